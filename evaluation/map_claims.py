"""Maps the papers' claims over the simulated machine: CPU bandwidth by GPU blocks, SIMULATED.

python evaluation/map_claims.py [--quick] [--help]
"""

import sys

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from evaluation.studies.claims_map import Options, main

__all__ = ["Options", "main"]

if __name__ == "__main__":
    sys.exit(main())
