"""What a format of the CPU tier changes in a model's predictions and answers, measured on this machine.

python evaluation/quality.py [--help]
"""

import sys

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from evaluation.studies.quality import Options, main

__all__ = ["Options", "main"]

if __name__ == "__main__":
    sys.exit(main())
