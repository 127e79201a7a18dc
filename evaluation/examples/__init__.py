"""Figures of one's own: a file of Python and an experiment file each (docs/artifact.md)."""
