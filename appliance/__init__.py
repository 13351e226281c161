"""The product: daemon, API, log, CLI. Never imports torch."""
