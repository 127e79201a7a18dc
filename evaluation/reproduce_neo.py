"""Reproduces the figures of NEO's evaluation (6, 7, 8, 9 and 10a), SIMULATED, and compares them with its claims.

python evaluation/reproduce_neo.py [--figure 6 10a] [--help]
"""

import sys

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from evaluation.studies.figures import NeoOptions as Options
from evaluation.studies.figures import neo_main as main

__all__ = ["Options", "main"]

if __name__ == "__main__":
    sys.exit(main())
