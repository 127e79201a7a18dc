"""Results: folders, provenance, progress, and the papers' claims."""
