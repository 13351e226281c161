"""Settings, where files lie, and how values are read."""
