"""Describe sequences, and where each of them stands."""
