"""Describe an accepted request, and its row in the log."""
