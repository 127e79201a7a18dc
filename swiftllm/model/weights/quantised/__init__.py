"""4-bit checkpoints: what config.json says of them, and a reader for each format."""
