"""A model's files: read, checked, described."""
