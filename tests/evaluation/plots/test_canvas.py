"""Figures are files: whatever MPLBACKEND says, they are drawn by Agg. matplotlib itself cannot be imported where the
variable names a package that is missing, as in a shell of Jupyter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

DRAW = (
    "import {module}\n"
    "from matplotlib import get_backend, pyplot as plt\n"
    "plt.figure()\n"
    "assert get_backend().lower() == 'agg', get_backend()\n"
)
TIMELINE = (
    "from apex.timeline.recorder import write_timeline\n"
    "try: write_timeline(None, None)\n"
    "except AttributeError: pass\n"  # of the target, after matplotlib is loaded
    "import matplotlib; assert matplotlib.get_backend().lower() == 'agg'\n"
)


@pytest.mark.parametrize("backend", ["module://matplotlib_inline.backend_inline", "QtAgg", "nonsense", ""])
@pytest.mark.parametrize("code", [DRAW.format(module="evaluation.validate"), TIMELINE], ids=["plots", "timeline"])
def test_figures_are_drawn_by_agg(backend: str, code: str) -> None:
    environment = {**os.environ, "MPLBACKEND": backend}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
