"""Options of commands: parsed by tyro, read from a YAML file, and the flags that commands share."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructTypeInfo

from apex.cli.output import InputError, input_errors
from apex.source_tree import CONFIGS
from apex.strategy import StrategyConfig
from swiftllm.config import EngineConfig, check_at_least
from swiftllm.core.request import SamplingParams
from swiftllm.files import check_writable
from swiftllm.model.folder import model_folder
from swiftllm.systems import find_system, systems

# -- parsing -----------------------------------------------------------------------------------------------------------
# Parses command lines into dataclasses with tyro; the text below each field is its help.

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


# -- options from a file -----------------------------------------------------------------------------------------------
# Options from a YAML file: they replace a command's defaults, and the command line overrides them.

Command = TypeVar("Command")

# `--num-gpu-blocks 64`, not `--engine.num-gpu-blocks 64`; `--synchronous` without a `--no-synchronous`.
MARKERS = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
HIDDEN = get_args(tyro.conf.Suppress[int])[1]  # marks fields that are not options
POSITIONAL = get_args(tyro.conf.Positional[int])[1]  # marks fields that have no flag


@dataclass(frozen=True)
class ConfigFile:
    """A command whose options may come from a file."""

    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = field(default=None, kw_only=True)
    """Read options from this YAML file, under the names of the flags; the command line overrides them."""


def parse_command(command: type[Command], prog: str, arguments: Sequence[str]) -> Command:
    """The command that ``arguments`` ask for, with the file of ``--config``, if any, as defaults.

    Raises:
        SystemExit: with 0 after ``--help``, with 2 for arguments that cannot be parsed.
        InputError: the file cannot be read, or an entry fits no option; the message names its line. Or a flag is one of
            vLLM or SGLang; the message says what stands for it here.
    """
    path = config_path(arguments)
    values = {} if path is None else read_config_file(path, command)
    check_foreign_flags(command, values, arguments)
    default = {} if path is None else {"default": with_values(command, values)}
    return parse_options(command, prog, list(arguments), MARKERS, **default)


def config_path(arguments: Sequence[str]) -> Path | None:
    """The last ``--config FILE`` or ``--config=FILE``; the parser reports a flag without a file."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path, nargs="?")
    return parser.parse_known_args(arguments)[0].config


def read_config_file(path: Path, command: type) -> dict[str, Any]:
    """The file's values by field name, converted to the types of the options."""
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
            flag = f"--{name.replace('_', '-')}"
            if flag in foreign_flags():
                raise InputError(f"{where}: {foreign_answers([flag])}")
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
    """``value`` converted to an option's type."""
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


# -- flags of vLLM and SGLang ------------------------------------------------------------------------------------------

FLAG = re.compile(r"(?<![\w-])--?[a-z][\w-]*")


def flags(command: type, values: Mapping[str, Any]) -> Iterator[str]:
    """The flags of a command and of its groups, as tyro makes them of the fields; ``values``: those of a file."""
    marked = get_type_hints(command, include_extras=True)
    for item, kind in shown_fields(command):
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            yield from flags(kind, values)
        elif POSITIONAL not in getattr(marked[item.name], "__metadata__", ()):
            negative = values.get(item.name, item.default) is True
            yield f"--{'no-' * negative}{item.name.replace('_', '-')}"


@functools.cache
def foreign_table() -> Mapping[str, Sequence[tuple[str, str, str]]]:
    """Rows by subject: flags of vLLM, of SGLang, and what stands for them here."""
    import yaml

    return yaml.safe_load((CONFIGS / "foreign_flags.yaml").read_text())


@functools.cache
def foreign_flags() -> Mapping[str, str]:
    """What stands here for each flag of vLLM and SGLang that has another name, or none; vLLM's rows come first."""
    answers: dict[str, str] = {}
    for engine in (0, 1):
        for row in (row for rows in foreign_table().values() for row in rows):
            others = [flag for flag in FLAG.findall(row[engine]) if flag not in FLAG.findall(row[2])]
            answers |= {flag: row[2] for flag in others if flag not in answers}
    return answers


def foreign_answers(foreign: Sequence[str]) -> str:
    """The message that answers these flags."""
    width = max(map(len, foreign))
    answers = [f"  {flag:{width}}  {foreign_flags()[flag]}" for flag in foreign]
    return "\n".join(["no such flag; what stands for it here (docs/coming_from_vllm.md):", *answers])


def check_foreign_flags(command: type, values: Mapping[str, Any], arguments: Sequence[str]) -> None:
    """Refuse flags that are vLLM's or SGLang's and not the command's. The parser answers all other unknown ones."""
    typed = [argument.partition("=")[0].replace("_", "-") for argument in arguments if argument.startswith("-")]
    unknown = dict.fromkeys(flag for flag in typed if flag not in {*flags(command, values), "-h", "--help"})
    if foreign := [flag for flag in unknown if flag in foreign_flags()]:
        raise InputError(foreign_answers(foreign))


def unknown_name(what: str, name: str, names: Sequence[str]) -> str:
    """The message for an unknown name, with the nearest known one."""
    near = difflib.get_close_matches(name.replace("_", "-"), names, n=1, cutoff=0.5)
    advice = f": did you mean {near[0]}?" if near else f"; there are {', '.join(names)}"
    return f"no {what} is called {name!r}{advice}"


# -- flags that commands share -----------------------------------------------------------------------------------------
# The flags that commands share: fields of the configuration classes, with the text below each as help.

if TYPE_CHECKING:
    from apex.placement.search import UniformLoad
    from swiftllm.engine.engine import Engine

    SystemName = str
else:
    SystemName = Literal[tuple(systems())]
SYSTEM_HELP = f"Scheduler. {'; '.join(f'{system.name}: {system.summary}' for system in systems().values())}."
ModelName = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
ProfileFile = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]
OutputFile = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]


def check_output_file(flag: str, path: Path | None) -> None:
    """Check that the file of an output flag can be written, before anything runs. Its folder is created."""
    if path is not None and path.is_dir():
        raise InputError(f"{flag} {path} is a folder: name a file")
    check_output_folder(flag, path and path.parent)


def check_output_folder(flag: str, folder: Path | None) -> None:
    """Check that files can be written to the folder of an output flag. It is created."""
    if folder is None:
        return
    try:
        check_writable(folder)
    except OSError as error:
        raise InputError(f"{flag}: the folder {folder} cannot be made or written to ({error.strerror})") from None


@dataclass(frozen=True)
class Unchecked:
    """First base of flag groups, which skips the checks of the second one, a configuration class.

    They run in :meth:`checked`, so their messages reach the user without the parser's text.
    """

    def __post_init__(self) -> None:
        pass

    def checked(self, **changes: Any) -> Any:
        """The configuration with these values."""
        return type(self).__bases__[1](**{**asdict(self), **changes})


@dataclass(frozen=True)
class EngineFlags(Unchecked, EngineConfig):
    """The model's device and dtype, and the engine's memory and thread limits."""

    model: tyro.conf.Suppress[str] = ""  # the command's own positional argument

    def config(self, model: str) -> EngineConfig:
        """The engine's configuration; a model on the hub is downloaded."""
        config = self.checked(model=model)
        return replace(config, model=str(model_folder(model, weights=config.load_format == "auto")))


@dataclass(frozen=True)
class SamplingFlags(Unchecked, SamplingParams):
    """How tokens are chosen and when the output stops."""

    seed: tyro.conf.Suppress[int | None] = None  # each prompt's seed derives from the engine's --seed
    logit_bias: tyro.conf.Suppress[tuple[tuple[int, float], ...]] = ()  # not useful on a command line
    bad_words: tyro.conf.Suppress[tuple[tuple[int, ...], ...]] = ()
    grammar: tyro.conf.Suppress[None] = None
    allowed_token_ids: tyro.conf.Suppress[tuple[int, ...] | None] = None
    logprobs: tyro.conf.Suppress[int | None] = None  # commands print only text
    prompt_logprobs: tyro.conf.Suppress[int | None] = None


@dataclass(frozen=True)
class StrategyFlags(Unchecked, StrategyConfig):
    """How the CPU is used."""

    def config(self, *systems: SystemName) -> StrategyConfig:
        """The strategies' configuration."""
        if not any(find_system(name).needs_predictions for name in systems) and self != StrategyFlags():
            raise InputError(
                f"the strategy flags have no effect on {' and '.join(systems)}, GPU-only: drop them, or name another "
                "--system"
            )
        return self.checked()


@dataclass(frozen=True)
class BestEffortFlags:
    """A second class of requests: best-effort ones, served with what the latency-sensitive ones leave."""

    best_effort_requests: int = 0
    """Best-effort requests beside the others, all there from the start."""
    best_effort_input_len: int | None = None
    """Prompt tokens of each best-effort request; by default --input-len."""
    best_effort_output_len: int | None = None
    """Output tokens of each best-effort request; by default --output-len."""
    duration_s: float | None = None
    """End the run after so many seconds; tokens of unfinished requests count in the figures by class.
    By default it ends with its last request."""

    def check_flags(self) -> None:
        """Refuse flags that are out of range or have no effect."""
        check_at_least(0, self, "best_effort_requests")
        for name in ("best_effort_input_len", "best_effort_output_len"):
            if getattr(self, name) is not None and not self.best_effort_requests:
                raise ValueError(f"--{name.replace('_', '-')} means nothing without --best-effort-requests")
            check_at_least(1, self, name)
        if self.duration_s is not None and not 0.0 < self.duration_s < math.inf:
            raise ValueError(f"duration_s={self.duration_s} must be a positive number of seconds")


@dataclass(frozen=True)
class TimelineFlags:
    """A timeline of some iterations."""

    trace_timeline: Annotated[Path | None, tyro.conf.arg(metavar="FILE|FOLDER")] = None
    """Write some iterations as a trace for ui.perfetto.dev (JSON) and as a chart (PNG); recording costs a little."""
    timeline_iterations: int = 3
    """Number of consecutive iterations to record."""
    timeline_start: int | None = None
    """First iteration to record, from 0; by default those nearest to the middle of the run that move CPU requests."""

    def check_flags(self, systems: Sequence[str]) -> None:
        """Check the flags before anything runs."""
        if self.trace_timeline is None:
            if self != TimelineFlags():
                raise ValueError("--timeline-iterations and --timeline-start mean nothing without --trace-timeline")
            return
        check_at_least(1, self, "timeline_iterations")
        check_at_least(0, self, "timeline_start")
        from apex.timeline.recorder import names_file

        if names_file(self.trace_timeline) and len(systems) > 1:
            raise ValueError(
                f"--trace-timeline {self.trace_timeline}: {len(systems)} systems need a folder, not a file"
            )
        check = check_output_file if names_file(self.trace_timeline) else check_output_folder
        check("--trace-timeline", self.trace_timeline)

    @contextmanager
    def traced(
        self, engine: Engine, setting: str, progress: Callable[[], float], *, simulated: bool = False
    ) -> Iterator[None]:
        """Record the run inside the ``with``, if asked for, and write its timeline at the end.

        ``setting`` describes what runs where; ``progress`` returns how far the run is, 0 to 1.
        """
        if self.trace_timeline is None:
            yield
            return
        from apex.timeline.recorder import recording, write_timeline

        window = {"num_iterations": self.timeline_iterations, "start": self.timeline_start}
        with recording(engine, **window, progress=progress) as recorder:
            yield
        try:
            timeline = recorder.timeline(engine.describe()["system"], setting, simulated=simulated)
            trace, picture = write_timeline(timeline, self.trace_timeline)
        except (ValueError, OSError) as error:  # the run's figures are still to be printed
            print(f"apex: no timeline: {error}", file=sys.stderr)
            return
        print(f"timeline: {trace} (for ui.perfetto.dev), {picture}")


def start_engine(
    system: SystemName,
    config: EngineConfig,
    strategy: StrategyConfig,
    profile: Path | None,
    workload: UniformLoad | None = None,
) -> Engine:
    """The engine that a command's flags ask for; prints its pools and threads.

    ``workload``: see :func:`apex.build.build_system`.
    """
    with input_errors():
        from apex.build import build_system

        engine = build_system(system, config, strategy, profile=profile, workload=workload)
    description = engine.describe()
    gpu_batch = f"GPU batch: {description['gpu_batch']}"
    weights = [f"Weights: {line}" for line in (description.get("weights_placement"),) if line]
    hosts = [f"Attention host {host}" for host in description.get("attention_hosts", ())]
    print(
        *weights,
        *description["kv_cache"],
        *hosts,
        gpu_batch,
        cpu_attention_line(description),
        sep="\n",
        file=sys.stderr,
    )
    return engine


@contextmanager
def running_engine(*what: Any) -> Iterator[Engine]:
    """The engine of :func:`start_engine`, closed at the end."""
    with closing(start_engine(*what)) as engine:
        yield engine


def cpu_attention_line(description: Mapping[str, Any]) -> str:
    """The kernel and threads of CPU attention, and their speed in the profile."""
    threads, rate = description["cpu_threads"], description.get("cpu_attention_gbps")
    speed = f", {rate:.1f} GB/s of K and V in the profile" if rate else ""
    if description.get("cpu_kv_dtype") == "int8":
        speed = f" over int8{speed}"
    return (
        f"CPU attention: kernel {description['cpu_kernel']} ({description['cpu_isa']}), {threads} "
        f"thread{'s' if threads > 1 else ''}{speed}"
    )
