"""Place lines on the terminal with Textual widgets, and turn keys into messages."""
