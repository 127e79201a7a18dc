"""Options from a file: the defaults of a command become what a YAML file says, and the command line still wins."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

import tyro

from apex.cli.errors import InputError
from apex.cli.parser import parse_options

Command = TypeVar("Command")

HIDDEN = tyro.conf.Suppress[int].__metadata__[0]  # the mark of fields that are no options


@dataclass(frozen=True)
class ConfigFile:
    """A command whose options may come from a file."""

    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = field(default=None, kw_only=True)
    """Take options from this YAML file, under the names of the flags; the command line wins."""


def parse(command: type[Command], prog: str, arguments: Sequence[str]) -> Command:
    """The command that ``arguments`` ask for, its defaults taken from the file of ``--config`` if there is one.

    Exits as parsers do: with 0 for ``--help``, with 2 for what cannot be understood.

    Raises:
        InputError: the file cannot be read, or says what no option says; the message names its line.
    """
    path = file_in(arguments)
    default = {} if path is None else {"default": command_with(command, read(path, command))}
    # `--num-gpu-blocks 64`, not `--engine.num-gpu-blocks 64`; `--synchronous` without a `--no-synchronous`.
    markers = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    return parse_options(command, prog, list(arguments), markers, **default)


def file_in(arguments: Sequence[str]) -> Path | None:
    """The last ``--config FILE`` or ``--config=FILE``; a flag that lacks its file is left to the parser."""
    path = None
    for index, word in enumerate(arguments):
        if word == "--":
            break
        if word.startswith("--config="):
            path = Path(word.partition("=")[2])
        elif word == "--config" and index + 1 < len(arguments):
            path = Path(arguments[index + 1])
    return path


def read(path: Path, command: type) -> dict[str, Any]:
    """What the file says, by the names of fields, each of its option's type.

    Raises:
        InputError: see :func:`parse`.
    """
    import yaml

    try:
        text = path.read_text()
        values, node = yaml.safe_load(text), yaml.compose(text)
    except OSError as error:
        raise InputError(f"--config {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise InputError(f"--config {path} must hold one `name: value` a line, such as `num-gpu-blocks: 64`")
    types = dict(options(command))
    found: dict[str, Any] = {}
    for key, _ in node.value:
        where, name = f"{path}:{key.start_mark.line + 1}", key.value.replace("-", "_")
        if name not in types:
            raise InputError(f"{where}: {unknown('option', key.value, [name.replace('_', '-') for name in types])}")
        if name in found:
            raise InputError(f"{where}: {key.value} is there twice")
        found[name] = checked(where, key.value, values[yaml.safe_load(key.value)], types[name])
    return found


def options(command: type) -> Iterator[tuple[str, Any]]:
    """Names and types of a command's options, those of its groups too."""
    for item, kind, is_hidden in typed_fields(command):
        if dataclasses.is_dataclass(kind):
            yield from options(kind)
        elif item.name != "config" and not is_hidden:
            yield item.name, kind


def typed_fields(command: type) -> Iterator[tuple[dataclasses.Field, Any, bool]]:
    """Fields with their types, and whether the command line hides them."""
    kinds, marked = get_type_hints(command), get_type_hints(command, include_extras=True)
    for item in dataclasses.fields(command):
        yield item, kinds[item.name], HIDDEN in getattr(marked[item.name], "__metadata__", ())


def checked(where: str, name: str, value: Any, kind: Any) -> Any:
    """``value`` as an option of this type.

    Raises:
        InputError: it is something else.
    """
    from pydantic import TypeAdapter, ValidationError

    if get_origin(kind) is tuple and not isinstance(value, list):
        value = [value]
    try:
        result = TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise InputError(f"{where}: {name}: {error.errors()[0]['msg']}, not {value!r}") from None
    if isinstance(value, bool) and not isinstance(result, bool):
        raise InputError(f"{where}: {name}: there is nothing to switch on or off: it wants a value")
    return result


def command_with(command: type[Command], values: Mapping[str, Any]) -> Command:
    """The command with these values in its fields and those of its groups; what it must be told and is not, is left
    to the command line."""
    given = {}
    for item, kind, is_hidden in typed_fields(command):
        if dataclasses.is_dataclass(kind):
            given[item.name] = command_with(kind, values)
        elif item.name in values and not is_hidden:
            given[item.name] = values[item.name]
        elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            given[item.name] = tyro.MISSING
    return command(**given)


def unknown(what: str, name: str, names: Sequence[str]) -> str:
    """There is no such thing: which one might be meant?"""
    near = difflib.get_close_matches(name.replace("_", "-"), names, n=1, cutoff=0.5)
    advice = f": did you mean {near[0]}?" if near else f"; there are {', '.join(names)}"
    return f"no {what} is called {name!r}{advice}"
