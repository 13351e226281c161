"""The Textual widgets: they place lines on the terminal and turn keys into messages."""
