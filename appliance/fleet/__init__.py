"""Place, start, watch and restart the workers."""
