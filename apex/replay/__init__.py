"""Replays requests through an engine in this process; records of each request; the definition of every metric."""
