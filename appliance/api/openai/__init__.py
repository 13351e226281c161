"""Read requests and write replies as OpenAI's completions and chats."""
