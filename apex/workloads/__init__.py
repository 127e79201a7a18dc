"""Workloads: published request traces and files of one's own, and requests with lengths, prompts and arrivals."""
