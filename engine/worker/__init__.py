"""The worker's half: a process per device that only steps; it is started, never imported."""
