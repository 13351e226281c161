"""The starter model: a small Llama that reads a document and answers from it, and its recipe."""
