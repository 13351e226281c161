"""Models by their names: the hub, its cache, what fits."""
