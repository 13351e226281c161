"""Track KV blocks: their users, states and prefixes."""
