"""Define the records that the daemon's readers share."""
