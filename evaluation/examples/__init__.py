"""Figures of one's own: a file of Python and an experiment file each (docs/reproduce/artifact.md)."""
