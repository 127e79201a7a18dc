"""The claims map: what holds in which cell, drawn and as a table."""
