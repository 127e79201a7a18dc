"""Results: provenance, claims, progress, and the folders that keep them."""
