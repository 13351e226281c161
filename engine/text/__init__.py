"""Text to token ids and back, and grammars over them."""
