"""Vectors and scores of texts, as OpenAI's, Cohere's, Jina's, vLLM's and Ollama's APIs ask them."""
