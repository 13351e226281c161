"""Show what the daemon does: frames, telemetry, metrics and the request log."""
