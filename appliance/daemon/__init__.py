"""Start the daemon, and stop it."""
