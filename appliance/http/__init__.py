"""Accept connections, check callers, and limit requests."""
