"""For a command that is run as a file: it imports from the repository, in a Python that has the packages.

``NEEDS`` of the command are the packages without which it cannot start, if these are not those of all commands.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # in place of this folder

from apex.environment import PACKAGES, use_environment  # noqa: E402

use_environment(*getattr(sys.modules["__main__"], "NEEDS", PACKAGES))
