"""Compares the scheduler `adaptive` with the papers' schedulers: 25 cases, a map, latency under load, wrong tables,
checks.

python evaluation/reproduce_adaptive.py [--part map] [--quick] [--help]
"""

import sys

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from evaluation.studies.adaptive import Options, main

__all__ = ["Options", "main"]

if __name__ == "__main__":
    sys.exit(main())
