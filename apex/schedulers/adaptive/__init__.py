"""The scheduler `adaptive`: which of the ways to use the CPU yields most tokens, and when to compute prompts."""
