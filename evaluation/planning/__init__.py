"""Plans measurements in a paper's setting: what fits this machine, how long it takes, how many requests there is time
for."""
