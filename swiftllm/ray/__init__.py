"""Places parts of an engine on the nodes of a Ray cluster. The only package that imports ray."""
