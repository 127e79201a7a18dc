"""The command line: `apex serve | generate | bench | simulate | profile | doctor | attention-host | validate`.

Torch takes seconds to import, so nothing here imports it before a command runs: help appears immediately.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from apex.cli.output import InputError
from swiftllm.systems import PluginNotFound


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that ``arguments`` name (by default those of the process) and return its exit status.

    Raises:
        SystemExit: from the parser: 2 for flags it cannot parse, 0 after a command's ``--help``.
    """
    try:
        from apex.cli.commands import run  # which takes a while, and asks plugins for their systems

        return run(sys.argv[1:] if arguments is None else arguments)
    except (InputError, PluginNotFound) as error:
        print(f"apex: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("apex: interrupted", file=sys.stderr)
        return 130
