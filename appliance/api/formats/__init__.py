"""How models write calls and reasoning, and how to read them."""
