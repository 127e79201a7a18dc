"""The command line: `apex generate | bench | simulate | profile | doctor | validate`.

Torch takes seconds to import, so nothing here imports it before a command runs: help comes at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import tyro

from apex.cli.bench import Bench
from apex.cli.doctor import Doctor
from apex.cli.errors import InputError
from apex.cli.flags import FLAT
from apex.cli.generate import Generate
from apex.cli.profile import Profile
from apex.cli.simulate import Simulate
from apex.cli.validate import OPTIONAL_VERBS, run_optional

DESCRIPTION = (
    "LLM serving for GPUs whose memory is too small: part of the KV cache, and its attention, on the CPU. "
    "`apex validate --help` tells of one command more: the simulator against this machine."
)

Command = (
    Annotated[Generate, tyro.conf.subcommand("generate")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
    | Annotated[Simulate, tyro.conf.subcommand("simulate")]
    | Annotated[Profile, tyro.conf.subcommand("profile")]
    | Annotated[Doctor, tyro.conf.subcommand("doctor")]
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that ``arguments`` name (by default those of the process) and return its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if arguments and arguments[0] in OPTIONAL_VERBS:
            return run_optional(arguments[0], arguments[1:])
        command = tyro.cli(Command, prog="apex", description=DESCRIPTION, args=arguments, config=FLAT)
        return command.run()
    except InputError as error:
        print(f"apex: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("apex: interrupted", file=sys.stderr)
        return 130
