"""The daemon observed: frames, alerts, energy, what makes no progress."""
