"""Run worker processes, each pinned to one device; they are started, never imported."""
