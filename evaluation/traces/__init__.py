"""Request traces: published lengths and arrivals, and the workloads made of them."""
