"""`python -m apex` is the installed command `apex`."""

import sys

from apex.environment import use_environment

use_environment("numpy", "rich", "torch", "tyro", "yaml")

from apex.cli import main  # noqa: E402

status = main()
# CPython notes an interrupt that comes out of exec(), as dataclasses call it while torch loads, and would have the
# process die of SIGINT in the end, caught or not. Another exec() takes the note back.
exec("")
sys.exit(status)
