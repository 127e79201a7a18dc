"""Plans measurements in a paper's setting: what fits this machine, and how long it takes."""
