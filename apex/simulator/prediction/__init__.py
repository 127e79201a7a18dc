"""Predicted times of a machine and a model: profile tables, placements of weights, the bound of all schedules."""
