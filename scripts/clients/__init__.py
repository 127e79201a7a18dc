"""What each client of the server is tried with; scripts/try_clients.sh installs them and prints the table."""
