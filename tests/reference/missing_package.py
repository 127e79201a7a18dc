"""`apex` where a package is missing.

In a process of its own: what is loaded meanwhile goes without the package for good.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def error_without(package: str, *arguments: str) -> str:
    """What ``apex`` says on standard error, after which it ends as for any mistake of its user."""
    code = f"import sys\nsys.modules[{package!r}] = None\nfrom apex.cli import main\nsys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stderr
    return done.stderr
