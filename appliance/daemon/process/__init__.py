"""Manage the daemon as a process: its limits, dumps, stacks, lines and reads of slow disks."""
