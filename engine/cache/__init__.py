"""KV blocks: who holds them, and which prefix each has."""
