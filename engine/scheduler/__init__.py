"""The daemon's half: decide which sequence runs where, and when. Never imports torch."""
