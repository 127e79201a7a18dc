"""The OpenAI-compatible server: the engine's thread (service), HTTP (api), and views of both (observe)."""
