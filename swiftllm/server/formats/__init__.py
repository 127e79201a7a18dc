"""Forms in which models write calls of tools and reasoning, and the reading of them."""
