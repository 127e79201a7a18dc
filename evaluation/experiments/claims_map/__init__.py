"""The plane of machines over which the papers' claims are looked for."""
