"""Figures and tables of two classes of service."""
