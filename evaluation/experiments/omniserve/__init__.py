"""The evaluation of two service classes: the points of its figures, and ratios between them."""
