"""Pull for a daemon of an older version, which knows the program by this name."""
