"""Start this version's workers for a daemon of an older version, which knows them by this name."""
