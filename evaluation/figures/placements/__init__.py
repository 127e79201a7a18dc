"""Where weights lie: Park and Egger's split search, and throughput with weights in 16 and 4 bits."""
