"""The steps of the papers' figures."""
