"""Compares ways to run a model on a machine with several GPUs: replicas, tensor parallelism, CPU attention.

python evaluation/compare_machines.py [--help]
"""

import sys

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from evaluation.studies.machines import Options, main

__all__ = ["Options", "main"]

if __name__ == "__main__":
    sys.exit(main())
