"""Write the daemon's metrics for Prometheus."""
