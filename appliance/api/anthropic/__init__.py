"""Read requests and write replies as Anthropic's messages."""
