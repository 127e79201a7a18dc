"""Experiments: the points of a figure, and the code that runs them."""
