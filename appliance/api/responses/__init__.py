"""Read requests and write replies as OpenAI's responses, and keep these for a while."""
