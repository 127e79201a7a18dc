"""The one way in which commands read their command line: dataclasses for tyro, the help text below each field."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import is_dataclass, replace
from typing import Annotated, Any, TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructTypeInfo

Options = TypeVar("Options")

SEEN = object()  # marks what the rule below passes on to the others, so that it lets it pass
HINTS = ConstructorRegistry()


@HINTS.struct_rule
def without_empty_hints(info: StructTypeInfo) -> StructConstructorSpec | None:
    """Options as they are, without "(default: None)": where the default is None or empty, the text says what holds."""
    if not is_dataclass(info.type) or SEEN in info.markers:
        return None
    spec = ConstructorRegistry.get_struct_spec(replace(info, markers=(*info.markers, SEEN)))
    no_hint = tyro.conf.arg(help_behavior_hint="")
    fields = (
        replace(field, type=Annotated[field.type, no_hint]) if field.default is None or field.default == () else field
        for field in spec.fields
    )
    return replace(spec, fields=tuple(fields))


def parse_options(
    options: type[Options],
    prog: str | None = None,
    arguments: Sequence[str] | None = None,
    markers: Sequence[Any] = (),
    **settings: Any,
) -> Options:
    """What the command line, or ``arguments``, says of a dataclass of options. ``markers`` are tyro's, for all fields;
    ``settings`` go to ``tyro.cli``.

    Raises:
        SystemExit: with 0 after ``--help``, with 2 for what cannot be understood.
    """
    markers = (tyro.conf.DisallowNone, *markers)  # nobody types "None": it is what is there without the flag
    try:
        return tyro.cli(options, prog=prog, args=arguments, config=markers, registry=HINTS, **settings)
    except BrokenPipeError:  # the help's reader has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end of the process
        raise SystemExit(0) from None
