"""A model's folder: where it is, and what its files hold beside the configuration."""
