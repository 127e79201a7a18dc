"""Predicted times: the performance model, and the profiler that measures its tables."""
