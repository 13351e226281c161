"""Order waiting prompts, and limit how many may wait."""
