"""Servers and their clients: starts servers, replays workloads against them over HTTP, draws the requests of a soak."""
