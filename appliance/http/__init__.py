"""The ways in: listeners, connections, who may come in and how much."""
