"""Draws Figure 1 of the APEX paper: linear operations over tokens, attention on GPU and CPU over the batch.

python evaluation/reproduce_fig1.py [--help]
"""

import sys

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from evaluation.studies.fig1 import Options, main

__all__ = ["Options", "main"]

if __name__ == "__main__":
    sys.exit(main())
