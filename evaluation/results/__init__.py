"""Results: records, metrics, provenance, claims, and the folders that keep them."""
