"""The starter model's files: weights, tokenizer, configuration, and a sample document."""
