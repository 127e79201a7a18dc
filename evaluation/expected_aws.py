"""Predicts what an evaluator on AWS may expect of Figure 5: claim, command, value and tolerance, time and dollars.

python evaluation/expected_aws.py [--help]
"""

import sys

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from evaluation.studies.aws import Options, main

__all__ = ["Options", "main"]

if __name__ == "__main__":
    sys.exit(main())
