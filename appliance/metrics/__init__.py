"""The request log: asked, written, kept within limits."""
