"""CPU attention workers: the task they run, and how they run it."""
