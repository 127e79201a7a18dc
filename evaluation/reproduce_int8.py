"""What a CPU tier in int8 brings on the papers' machines, SIMULATED.

python evaluation/reproduce_int8.py [--help]
"""

import sys

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from evaluation.studies.int8 import Options, main

__all__ = ["Options", "main"]

if __name__ == "__main__":
    sys.exit(main())
