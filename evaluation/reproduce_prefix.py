"""What prefix caches bring by where they keep blocks, SIMULATED, and what they save on this machine, measured.

python evaluation/reproduce_prefix.py [--help]
"""

import sys

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from evaluation.studies.prefix import Options, main

__all__ = ["Options", "main"]

if __name__ == "__main__":
    sys.exit(main())
