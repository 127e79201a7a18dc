"""What is known of GPUs, hosts and links: their files, and measured operator times."""
