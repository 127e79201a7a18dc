"""What an operator sees of a server: metrics, status page, log."""
