"""The load generator, and its statistics, against any server that speaks OpenAI's API."""
