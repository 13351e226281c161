"""Keep what outlives the daemon, so that its death breaks no reply."""
