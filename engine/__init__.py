"""Load, schedule and run models, without HTTP, SQL, TOML or a terminal."""
