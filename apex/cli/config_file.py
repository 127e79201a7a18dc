"""Options from a YAML file: they replace a command's defaults, and the command line overrides them."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import tyro

from apex.cli.errors import InputError
from apex.cli.parser import parse_options

Command = TypeVar("Command")

# `--num-gpu-blocks 64`, not `--engine.num-gpu-blocks 64`; `--synchronous` without a `--no-synchronous`.
MARKERS = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
HIDDEN = get_args(tyro.conf.Suppress[int])[1]  # marks fields that are not options


@dataclass(frozen=True)
class ConfigFile:
    """A command whose options may come from a file."""

    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = field(default=None, kw_only=True)
    """Read options from this YAML file, under the names of the flags; the command line overrides them."""


def parse_command(command: type[Command], prog: str, arguments: Sequence[str]) -> Command:
    """The command that ``arguments`` ask for, with the file of ``--config``, if any, as defaults.

    Raises:
        SystemExit: with 0 after ``--help``, with 2 for arguments that cannot be parsed.
        InputError: the file cannot be read, or an entry fits no option; the message names its line.
    """
    path = config_path(arguments)
    default = {} if path is None else {"default": with_values(command, read_config_file(path, command))}
    return parse_options(command, prog, list(arguments), MARKERS, **default)


def config_path(arguments: Sequence[str]) -> Path | None:
    """The last ``--config FILE`` or ``--config=FILE``; the parser reports a flag without a file."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path, nargs="?")
    return parser.parse_known_args(arguments)[0].config


def read_config_file(path: Path, command: type) -> dict[str, Any]:
    """The file's values by field name, converted to the types of the options.

    Raises:
        InputError: see :func:`parse_command`.
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
    types = dict(option_types(command))
    found: dict[str, Any] = {}
    for key, _ in node.value:
        where, name = f"{path}:{key.start_mark.line + 1}", key.value.replace("-", "_")
        if name not in types:
            raise InputError(
                f"{where}: {unknown_name('option', key.value, [name.replace('_', '-') for name in types])}"
            )
        if name in found:
            raise InputError(f"{where}: {key.value} is there twice")
        found[name] = checked_value(where, key.value, values[yaml.safe_load(key.value)], types[name])
    return found


def option_types(command: type) -> Iterator[tuple[str, Any]]:
    """Names and types of a command's options, including those of its groups."""
    for item, kind in shown_fields(command):
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            yield from option_types(kind)
        elif item.name != "config":
            yield item.name, kind


def shown_fields(command: type) -> Iterator[tuple[dataclasses.Field, Any]]:
    """The fields that the command line does not hide, and their types."""
    kinds, marked = get_type_hints(command), get_type_hints(command, include_extras=True)
    for item in dataclasses.fields(command):
        if HIDDEN not in getattr(marked[item.name], "__metadata__", ()):
            yield item, kinds[item.name]


def checked_value(where: str, name: str, value: Any, kind: Any) -> Any:
    """``value`` converted to an option's type.

    Raises:
        InputError: it cannot be converted.
    """
    from pydantic import TypeAdapter, ValidationError

    if get_origin(kind) is tuple and not isinstance(value, list):
        value = [value]
    try:
        result = TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise InputError(f"{where}: {name}: {error.errors()[0]['msg']}, not {value!r}") from None
    if isinstance(value, bool) and not isinstance(result, bool):
        raise InputError(f"{where}: {name}: this option is not a switch: it wants a value")
    return result


def with_values(command: type[Command], values: Mapping[str, Any]) -> Command:
    """The command with these values in its fields and those of its groups.

    Required options without a value are left to the command line.
    """
    given = {}
    for item, kind in shown_fields(command):
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            given[item.name] = with_values(kind, values)
        elif item.name in values:
            given[item.name] = values[item.name]
        elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            given[item.name] = tyro.MISSING
    return command(**given)


def unknown_name(what: str, name: str, names: Sequence[str]) -> str:
    """The message for an unknown name, with the nearest known one."""
    near = difflib.get_close_matches(name.replace("_", "-"), names, n=1, cutoff=0.5)
    advice = f": did you mean {near[0]}?" if near else f"; there are {', '.join(names)}"
    return f"no {what} is called {name!r}{advice}"
