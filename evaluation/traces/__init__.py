"""Request traces: published lengths and arrivals, and workloads made from them."""
