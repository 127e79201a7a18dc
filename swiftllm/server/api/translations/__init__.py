"""Other APIs than OpenAI's chat, as translations onto it: bodies become chat bodies, and outputs typed events."""
