"""Fits of the calibrated hardware files to measured tables."""
