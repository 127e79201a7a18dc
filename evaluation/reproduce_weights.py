"""What 4-bit weights, streamed weights and the CPU tier of KV cache give on small cards, SIMULATED.

python evaluation/reproduce_weights.py [--help]
"""

import sys

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from evaluation.studies.weights import Options, main

__all__ = ["Options", "main"]

if __name__ == "__main__":
    sys.exit(main())
