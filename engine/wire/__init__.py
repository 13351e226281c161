"""What crosses between the daemon and its workers."""
