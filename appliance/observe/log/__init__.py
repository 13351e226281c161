"""Write, query and prune the request log."""
