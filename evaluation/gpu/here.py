"""For a command that is run as a file: as ``evaluation/here.py``, which finds this repository from the folder above."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])  # in place of this folder

from evaluation import here  # noqa: E402
