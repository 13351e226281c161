"""Load, swap and park the models that are served in turns."""
