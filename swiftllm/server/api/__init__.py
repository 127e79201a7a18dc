"""HTTP: OpenAI's endpoints, the request bodies they accept, and the responses."""
