"""What is shown of the daemon: the records that its readers share."""
