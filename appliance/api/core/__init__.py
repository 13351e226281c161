"""Turn a request of any dialect into what is asked of the model, and its tokens into a reply."""
