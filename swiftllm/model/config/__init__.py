"""What config.json says of a model."""
