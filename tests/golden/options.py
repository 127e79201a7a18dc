"""docs/serving/options.md: the options of all `apex` commands, read from their parsers."""

from __future__ import annotations

import argparse
import re
import warnings
from collections import defaultdict
from typing import NamedTuple

import tyro

from apex.cli.commands import COMMANDS
from apex.cli.options import HINTS, MARKERS
from evaluation.validate import Options
from tests.golden import help

PATH = help.ROOT / "docs/serving/options.md"
BAR = r"\|"  # within a cell of a table
PREFACE = """# Options

All options of `apex`, as `apex COMMAND --help` prints them. This page is made from the commands by
`.venv/bin/python -m tests.golden`, and a test checks that it is current. Commands with
`--config` also read their options from a YAML file. Where an option has no default here, its text says
what applies without it.
"""


class Option(NamedTuple):
    flag: str
    value: str
    text: str
    default: str


Group = tuple[Option, ...]


def page() -> str:
    """The page as it should be now: tables of each command, then of the groups that several commands share."""
    groups = {name: groups_of(command) for name, command in (COMMANDS | {"validate": Options}).items()}
    commands: dict[tuple[str, Group], list[str]] = defaultdict(list)
    for name, of_command in groups.items():
        for title, options in of_command.items():
            commands[title, options].append(name)
    parts = [PREFACE]
    for name, of_command in groups.items():
        parts.append(f"## `apex {name}`\n")
        shared = []
        for title, options in of_command.items():
            if len(commands[title, options]) > 1:
                shared.append(f"[{title}](#{title.replace(' ', '-')})")
            else:
                parts += [f"{title.capitalize()}:\n" if title != "options" else "", table(options)]
        if shared:
            parts.append(f"Also: {', '.join(shared)}.\n")
    for (title, options), names in commands.items():
        if len(names) > 1:
            parts += [f"## {title.capitalize()}\n", f"Of {', '.join(f'`{name}`' for name in names)}.\n", table(options)]
    return "\n".join(part for part in parts if part)


def groups_of(command: type) -> dict[str, Group]:
    """The options of a command, by the titles of their groups."""
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning), help.terminal(["apex"], 100):
        parser = tyro.extras.get_parser(command, config=(tyro.conf.DisallowNone, *MARKERS), registry=HINTS)
    groups: dict[str, list[Option]] = defaultdict(list)
    for group in parser._action_groups:
        title = group.title.replace("positional arguments", "options")
        groups[title] += [option_of(action) for action in group._group_actions if action.dest != "help"]
    return {title: tuple(options) for title, options in groups.items() if options}


def option_of(action: argparse.Action) -> Option:
    """An option as argparse holds it. Its help ends with the default."""
    printed = " ".join(help.without_paths(action.help).replace("REPOSITORY/", "").replace("%%", "%").split())
    text, default = re.fullmatch(r"(.*?)(?: ?\((required|default: .*)\))?", printed).groups(default="")
    if not action.option_strings:
        return Option(action.metavar, "", text, default)
    return Option(action.option_strings[0], action.metavar or "", text, default.removeprefix("default: "))


def table(options: Group) -> str:
    """A table of Markdown."""
    rows = ["| option | value | default | what it does |", "|---|---|---|---|"]
    for option in options:
        cells = (code(option.flag), code(option.value), code(option.default), escaped(option.text))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def code(text: str) -> str:
    return text and f"`{text.replace('|', BAR)}`"


def escaped(text: str) -> str:
    return text.replace("|", BAR).replace("<", "&lt;")
