"""Find cached prefixes and snapshots for prompts, and bring them to where they are needed."""
