"""Experiments: the points of a figure, and what runs them."""
