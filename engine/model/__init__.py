"""Compute a model's steps with torch, which in engine only this package and workers import."""
