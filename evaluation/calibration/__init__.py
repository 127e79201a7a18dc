"""Fits the calibrated hardware files to measured tables."""
