"""Compute a model's steps with torch."""
