"""Replays requests through an engine in this process, keeps a record of each, and computes every metric from these."""
