"""`python -m apex` is the installed command `apex`."""

import sys

from apex.cli import main

sys.exit(main())
