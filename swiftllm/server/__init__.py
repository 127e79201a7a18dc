"""The OpenAI-compatible server: an engine on a thread of its own, and HTTP in front of it."""
