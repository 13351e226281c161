"""Show the daemon's frames in a console, using the protocol and the client alone."""
