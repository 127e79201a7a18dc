"""Parses command lines into dataclasses with tyro; the text below each field is its help."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import is_dataclass, replace
from typing import Annotated, Any, TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructTypeInfo

Options = TypeVar("Options")

SEEN = object()  # marks types that the rule below has handed to the other rules, so that it skips them
HINTS = ConstructorRegistry()


@HINTS.struct_rule
def without_empty_hints(info: StructTypeInfo) -> StructConstructorSpec | None:
    """Suppresses "(default: None)" and the like: for None and empty defaults the help text says what applies.

    Options that ``LAST_IN_HELP`` of their class names come after the others.
    """
    if not is_dataclass(info.type) or SEEN in info.markers:
        return None
    spec = ConstructorRegistry.get_struct_spec(replace(info, markers=(*info.markers, SEEN)))
    no_hint = tyro.conf.arg(help_behavior_hint="")
    assert isinstance(spec, StructConstructorSpec), f"{info.type} is a dataclass"
    fields = [
        replace(field, type=Annotated[field.type, no_hint]) if field.default is None or field.default == () else field
        for field in spec.fields
    ]
    last = getattr(info.type, "LAST_IN_HELP", ())
    return replace(spec, fields=tuple(sorted(fields, key=lambda field: field.name in last)))


def parse_options(
    options: type[Options],
    prog: str | None = None,
    arguments: Sequence[str] | None = None,
    markers: Sequence[Any] = (),
    **settings: Any,
) -> Options:
    """The dataclass ``options``, filled from ``arguments`` (by default the command line).

    ``markers`` are tyro's, for all fields; ``settings`` go to ``tyro.cli``.

    Raises:
        SystemExit: with 0 after ``--help``, with 2 for arguments that cannot be parsed.
    """
    markers = (tyro.conf.DisallowNone, *markers)  # None is the value of an absent flag, not one to type
    try:
        return tyro.cli(options, prog=prog, args=arguments, config=markers, registry=HINTS, **settings)
    except BrokenPipeError:  # the reader of the help has closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        raise SystemExit(0) from None
