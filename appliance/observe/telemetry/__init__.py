"""Observe the daemon: frames, alerts, energy, and workers without progress."""
