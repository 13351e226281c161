"""Serve operators, routers and Prometheus."""
