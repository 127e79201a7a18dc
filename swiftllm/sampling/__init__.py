"""From logits to tokens: penalties, draws, log-probabilities."""
