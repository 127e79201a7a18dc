"""`python -m apex` is the installed command `apex`."""

import sys

from apex.cli import main

status = main()
# CPython notes an interrupt that comes out of exec(), as dataclasses call it while torch loads, and would have the
# process die of SIGINT in the end, caught or not. Another exec() takes the note back.
exec("")
sys.exit(status)
