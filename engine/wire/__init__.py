"""Define messages and channels between the daemon and its workers."""
