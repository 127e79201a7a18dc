"""Drivers replay a workload against a system and return what happened to each request."""
