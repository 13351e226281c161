"""Append-only schema steps of the request log."""
