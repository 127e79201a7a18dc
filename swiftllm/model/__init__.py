"""Llama-family models on rows of tokens: shapes, rotary positions, weights, and the linear work between attentions."""
