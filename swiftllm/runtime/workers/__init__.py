"""CPU attention workers: the tasks they run as values, and the ways of running them."""
