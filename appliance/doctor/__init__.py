"""Check this machine for faults, and collect reports."""
