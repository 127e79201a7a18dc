"""The commands by name, and the overview of them. Nothing here imports torch before a command runs."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from apex.cli.bench import Bench
from apex.cli.doctor import Doctor
from apex.cli.generate import Generate
from apex.cli.options import parse_command, unknown_name
from apex.cli.output import InputError, optional_module, stdout_console, table
from apex.cli.profile import Profile
from apex.cli.serve import AttentionHostCommand, Serve
from apex.cli.simulate import Simulate
from swiftllm import __version__

COMMANDS = {
    "serve": Serve,
    "generate": Generate,
    "bench": Bench,
    "simulate": Simulate,
    "profile": Profile,
    "doctor": Doctor,
    "attention-host": AttentionHostCommand,
}

OPTIONAL_VERBS = {"validate": ("evaluation.validate", "Compare the simulator with real runs on this machine.")}
"""Verbs of a package above this one, which `apex` may not import directly: the module of each, and its summary."""


def run_optional(verb: str, arguments: Sequence[str]) -> int:
    """Run a verb of another package, which is imported by name, and return its exit status."""
    return optional_module(OPTIONAL_VERBS[verb][0], f"apex {verb}").command(arguments)


def run(arguments: Sequence[str]) -> int:
    """Run the command that ``arguments`` name and return its exit status.

    Raises:
        InputError: there is no such command, or it cannot do what it is asked.
        SystemExit: from the parser: 2 for flags it cannot parse, 0 after a command's ``--help``.
    """
    verb = arguments[0] if arguments else "--help"
    if verb in ("-h", "--help", "help"):
        print_overview()
        return 0
    if verb == "--version":
        print(f"apex {__version__}")
        return 0
    if verb in OPTIONAL_VERBS:
        return run_optional(verb, arguments[1:])
    if verb not in COMMANDS:
        raise InputError(unknown_name("command", verb, [*COMMANDS, *OPTIONAL_VERBS]))
    return parse_command(COMMANDS[verb], f"apex {verb}", arguments[1:]).run()


def print_overview() -> None:
    """Print the commands, one a line, and which to begin with."""
    summaries = {verb: (inspect.getdoc(command) or "").partition("\n")[0] for verb, command in COMMANDS.items()}
    summaries |= {verb: summary for verb, (_, summary) in OPTIONAL_VERBS.items()}
    console = stdout_console()
    console.print("usage: apex COMMAND ...\n\nLLM serving for GPUs whose memory is too small for the KV cache:")
    console.print("host memory holds a part of it, and the CPU computes that part's attention.\n")
    console.print(table(("command", "what it does"), list(summaries.items()), left=("command", "what it does")))
    console.print("\nBegin with `apex doctor`, then `apex serve MODEL`. `apex COMMAND --help` lists all options.")
