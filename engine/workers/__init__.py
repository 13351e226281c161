"""Processes pinned to one device each; started, never imported by others."""
