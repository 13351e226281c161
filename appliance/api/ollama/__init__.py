"""Read requests and write replies as Ollama does."""
