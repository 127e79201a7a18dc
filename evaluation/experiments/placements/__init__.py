"""Weights that do not fit, predicted: Park and Egger's experiments, and points of models on small cards."""
