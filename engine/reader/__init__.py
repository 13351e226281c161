"""The process that reads strangers' text for the daemon."""
