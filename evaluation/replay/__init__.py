"""Starts servers, replays workloads against them over HTTP, and generates the requests of a soak."""
