"""Outputs of requests, and the answers of OpenAI's endpoints that are made of them."""
