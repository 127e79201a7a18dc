"""Reproduces the figures of OmniServe's evaluation (10 to 19), SIMULATED, and compares them with its claims.

python evaluation/reproduce_omniserve.py [--figure a10 10 18] [--help]
python evaluation/reproduce_omniserve.py --figure http           # MEASURED: servers on this machine
"""

import sys

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from evaluation.studies.omniserve import Options, main

__all__ = ["Options", "main"]

if __name__ == "__main__":
    sys.exit(main())
