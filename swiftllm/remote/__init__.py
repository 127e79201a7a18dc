"""CPU attention on other hosts: the protocol, the process that serves it, and the tier that speaks it."""
