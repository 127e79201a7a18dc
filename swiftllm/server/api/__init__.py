"""HTTP: OpenAI's endpoints, what a body may say, and how answers are written."""
