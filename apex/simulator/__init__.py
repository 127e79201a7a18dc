"""Simulated machines: hardware files, predicted profile tables, the backend on a virtual clock."""
