"""Predicts the experiments of Park and Egger: split search, generations of three models, beside their claims.

python evaluation/reproduce_split_point.py [--help]
"""

import sys

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from evaluation.studies.split_point import Options, main

__all__ = ["Options", "main"]

if __name__ == "__main__":
    sys.exit(main())
