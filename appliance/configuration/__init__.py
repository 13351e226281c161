"""Read settings, and locate the daemon's files."""
