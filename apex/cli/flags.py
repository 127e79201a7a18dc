"""The flags that commands share: fields of the configuration classes, with the text below each as help."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from apex.cli.errors import InputError, input_errors
from apex.strategy import StrategyConfig
from apex.timeline.files import names_file, write_timeline
from swiftllm.config import EngineConfig, check_at_least
from swiftllm.core.request import SamplingParams
from swiftllm.files import check_writable
from swiftllm.model.folder.hub import model_folder
from swiftllm.systems import find_system, systems

if TYPE_CHECKING:
    from apex.placement.budget import UniformLoad
    from swiftllm.engine.engine import Engine

    SystemName = str
else:
    SystemName = Literal[tuple(systems())]
ModelName = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
ProfileFile = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]
OutputFile = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]


def check_output_file(flag: str, path: Path | None) -> None:
    """Check that the file of an output flag can be written, before anything runs. Its folder is created.

    Raises:
        InputError: it cannot be written; the message names the flag.
    """
    if path is not None and path.is_dir():
        raise InputError(f"{flag} {path} is a folder: name a file")
    check_output_folder(flag, path and path.parent)


def check_output_folder(flag: str, folder: Path | None) -> None:
    """Check that files can be written to the folder of an output flag. It is created.

    Raises:
        InputError: they cannot be written; the message names the flag.
    """
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
        """The configuration with these values.

        Raises:
            ValueError: one of them is out of range.
        """
        return type(self).__bases__[1](**{**asdict(self), **changes})


@dataclass(frozen=True)
class EngineFlags(Unchecked, EngineConfig):
    """The model's device and dtype, and the engine's memory and thread limits."""

    model: tyro.conf.Suppress[str] = ""  # the command's own positional argument

    def config(self, model: str) -> EngineConfig:
        """The engine's configuration; a model on the hub is downloaded.

        Raises:
            FileNotFoundError: the model is neither a local folder nor on the hub.
            ValueError: a value is out of range.
        """
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
        """The strategies' configuration.

        Raises:
            InputError: a strategy flag is given and none of ``systems`` has strategies.
            ValueError: the flags contradict each other.
        """
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
        """
        Raises:
            ValueError: a flag is out of range or has no effect.
        """
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
        """Check the flags before anything runs.

        Raises:
            ValueError: a flag has no effect or is out of range, or several systems share a file.
            InputError: the file cannot be written.
        """
        if self.trace_timeline is None:
            if self != TimelineFlags():
                raise ValueError("--timeline-iterations and --timeline-start mean nothing without --trace-timeline")
            return
        check_at_least(1, self, "timeline_iterations")
        check_at_least(0, self, "timeline_start")
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
        from apex.timeline.recorder import recording

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

    ``workload``: see :func:`apex.systems.build_system`.

    Raises:
        InputError: the engine cannot be built; the message says what to do.
    """
    with input_errors():
        from apex.systems import build_system

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
