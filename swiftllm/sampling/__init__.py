"""Sampling of tokens from logits: penalties, draws, log-probabilities."""
