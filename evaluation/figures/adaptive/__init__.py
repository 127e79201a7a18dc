"""Figures and tables about the scheduler `adaptive`, drawn from summary records."""
