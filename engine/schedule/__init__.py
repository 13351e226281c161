"""Decide which sequence runs where, and when."""
