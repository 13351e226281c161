"""Reach a daemon as every client does: by its address, over HTTP."""
