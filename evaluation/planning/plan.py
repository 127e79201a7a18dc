"""What a measurement in a paper's setting would give, how long it would take, and how many requests the time allows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from apex.cli.output import number, table
from evaluation.drivers import SimulatedTask, TorchTask, run_simulated_point
from evaluation.grid import Grid, Place, clip_lengths, lengths_of, setting_of
from evaluation.measure.live_systems import LiveSystems, ProfiledMachine, simulated_twin
from evaluation.measure.processes import ChildEnded
from evaluation.planning.setting import (
    LocalSetting,
    Paper,
    local_setting,
    on_hosts_here,
    panels_for_rehearsal,
    panels_here,
)
from evaluation.results.progress import format_s, print_line
from evaluation.results.provenance import cpu_kernels, fingerprint, source_hash
from evaluation.run import Point, plain, processes
from evaluation.studies.papers import FigureOptions, point_names, with_output_lens
from swiftllm.files import cache_dir, is_kept, keep
from swiftllm.machine import (
    GIB,
    Card,
    InsufficientMemory,
    available_host_bytes,
    first_card,
    host_memory_bytes,
    usable_cores,
)

# -- numbers of requests ----------------------------------------------------------------------------------------------

FEWEST_REQUESTS = 16
"""Fewer requests than this say little about throughput."""
STRIDE = 4
"""Times as many requests as fit are tried next: a simulation of few takes little time."""
CLOSE = 0.05
"""Numbers of requests that differ by this share or less are not told apart: each try is a simulation."""


class TooLittleTime(ValueError):
    """Even the fewest requests do not fit the time."""


def counts_at(fraction: float, most: Sequence[int]) -> tuple[int, ...]:
    """Requests of each panel at a fraction of its full number: at least ``FEWEST_REQUESTS``, at most all of them."""
    return tuple(min(full, max(FEWEST_REQUESTS, round(fraction * full))) for full in most)


def counts_within(
    most: Sequence[int], limit_s: float, seconds_of: Callable[[tuple[int, ...]], float]
) -> tuple[int, ...]:
    """The largest common fraction of the panels' requests whose points take at most ``limit_s`` in all.

    ``most`` are the panels' full numbers of requests; ``seconds_of`` predicts the total time of some numbers.

    Raises:
        TooLittleTime: the fewest requests take longer; the message names the hours that they need.
    """
    largest = max(most)

    def seconds_at(requests: int) -> float:
        return seconds_of(counts_at(requests / largest, most))

    fits = min(largest, FEWEST_REQUESTS)  # of the largest panel, as all numbers here
    if (fewest_s := seconds_at(fits)) > limit_s:
        raise TooLittleTime(
            f"{limit_s / 3600:.2g} hours are too few: {FEWEST_REQUESTS} requests per point take "
            f"{math.ceil(fewest_s / 36) / 100:.2f} hours; give more --hours, or fewer --workloads or --systems"
        )
    too_many, guess = None, min(STRIDE * fits, largest)
    while guess - fits > CLOSE * fits:
        if seconds_at(guess) <= limit_s:
            fits = guess
        else:
            too_many = guess
        guess = math.isqrt(fits * too_many) if too_many else min(STRIDE * fits, largest)
    return counts_at(fits / largest, most)


# -- predictions ------------------------------------------------------------------------------------------------------

PREDICTED = {"predicted_output_tokens_per_s": "output_tokens_per_s", "predicted_wall_s": "wall_s"}
"""Fields of a measured row that its simulated twin gives, by what they are called in the twin's."""


def predict(
    points: Sequence[Point], machines: Sequence[ProfiledMachine], jobs: int
) -> tuple[list[Point], tuple[str, ...]]:
    """The points with the SIMULATED results of their twins in their rows, and why there are none for some.

    What is not in the cache is simulated in up to ``jobs`` processes.
    """
    source = source_hash()
    twins = {}
    for point, machine in zip(points, machines, strict=True):
        twin = simulated_twin(point.task, machine)
        twins[point.key] = _cache_file(twin, source), twin
    left = [file_and_twin for file_and_twin in twins.values() if not is_kept(file_and_twin[0])]
    console = Console(stderr=True)
    bar = {"description": "predicting the plan", "total": len(left), "console": console}
    bar["disable"] = not console.is_terminal
    if min(jobs, len(left)) <= 1:
        problems = [simulate(*one) for one in track(left, **bar)]
    else:
        with processes(min(jobs, len(left))) as pool:
            problems = list(track(pool.map(simulate, *zip(*left, strict=True)), **bar))
    predicted = []
    for point in points:
        file, _ = twins[point.key]
        found = json.loads(file.read_text()) if is_kept(file) else dict.fromkeys(PREDICTED)
        predicted.append(replace(point, task=replace(point.task, values={**point.task.values, **found})))
    return predicted, tuple(sorted(set(filter(None, problems))))


def simulate(file: Path, twin: SimulatedTask) -> str | None:
    """Keep what a twin gives in a file; returns why it gives nothing, where that is so."""
    try:
        values = run_simulated_point(Point("", "", "", twin), "", Console(quiet=True)).values
    except Exception as error:  # a point that cannot be predicted is measured all the same
        return f"{type(error).__name__}: {error}"
    keep(file, json.dumps({name: values[field] for name, field in PREDICTED.items()}) + "\n")
    return None


def _cache_file(task: SimulatedTask, source: str) -> Path:
    """The file of a task's prediction. Its name is a hash of all that decides it, with the ``source`` code's hash."""
    decides = [plain(replace(task, values={})), source]
    return cache_dir() / "predictions" / f"{fingerprint(decides)}.json"


# -- plans ------------------------------------------------------------------------------------------------------------

VLLM = "vllm"
SERVER_START_S = 120.0
"""Assumed seconds until a vLLM server is ready: it compiles the model and captures graphs. No GPU was at hand."""


@dataclass(frozen=True)
class Plan:
    """Points whose rows hold their predictions; ``start_s`` are the seconds that each session takes to start.

    ``problems`` say why some have none.
    """

    points: tuple[Point, ...]
    start_s: Mapping[Hashable, float]
    problems: tuple[str, ...] = ()

    @property
    def total_s(self) -> float:
        return sum(point.task.values["predicted_wall_s"] or 0.0 for point in self.points) + sum(self.start_s.values())


@dataclass(frozen=True)
class Planner:
    """Plans the measured points of a grid.

    Attributes:
        settings, machines: the grid's settings by name, and what was measured of this machine for each.
        vllm: the program that serves the system of this name. Where it is None, that system is our engine with vLLM's
            scheduling rules.
        stall_timeout_s: a point without progress for so long is abandoned.
        row: fields of places for the rows.
        jobs: predictions to make in parallel.
    """

    grid: Grid
    settings: Mapping[str, LocalSetting]
    machines: Mapping[str, ProfiledMachine]
    vllm: Path | None
    stall_timeout_s: float
    row: tuple[str, ...]
    jobs: int

    @property
    def most(self) -> tuple[int, ...]:
        """The full number of requests of each panel."""
        return tuple(panel["num_requests"] for panel in self.grid.panels)

    def plan_with(self, counts: Sequence[int]) -> Plan:
        """The plan with these numbers of requests, a number for each panel."""
        panels = [{**panel, "num_requests": n} for panel, n in zip(self.grid.panels, counts, strict=True)]
        points = [self._point(place) for place in Grid(tuple(panels)).places()]
        machines = [self.machines[point.task.values["setting"]] for point in points]
        start_s: dict[Hashable, float] = {}
        for point, machine in zip(points, machines, strict=True):
            start_s[point.session] = SERVER_START_S if is_server(point) else machine.start_s
        predicted, problems = predict(points, machines, self.jobs)
        return Plan(tuple(predicted), start_s, problems)

    def _point(self, place: Place) -> Point:
        system, lengths = place["system"], lengths_of(place)
        local = self.settings[setting_of(place).name]
        clipped, num_clipped = clip_lengths(lengths, local.engine.max_model_len)
        parts, words = [f"here-{place['panel']}", local.name], [local.title]
        key, group, label = point_names(parts, words, lengths, place)
        row = {name: {**place, "point": key}.get(name) for name in self.row}
        values = {**local.row(), **row, "num_clipped": num_clipped}
        program = self.vllm if system == VLLM else None
        values |= {} if program else {"server": None}
        task = TorchTask(system, local.engine, clipped, values, self.stall_timeout_s, program)
        return Point(key, group, label, task, session=(local.name, system))

    def describe(self, points: Sequence[Point]) -> dict[str, Any]:
        """Points and settings for the run's identity: everything that decides their numbers."""
        return {
            "settings": {name: setting.identity for name, setting in self.settings.items()},
            "cpu_kernels": cpu_kernels(),
            "points": [{"key": p.key, "system": p.task.system, **p.task.lengths.identity} for p in points],
        }


def plan_within(planners: Sequence[Planner], limit_s: float) -> list[Plan]:
    """Plans with the same fraction of each panel's requests, the largest whose points take ``limit_s`` seconds in all.

    Raises:
        TooLittleTime: even the fewest requests take longer.
    """
    most = [full for planner in planners for full in planner.most]

    def plans_with(counts: Sequence[int]) -> list[Plan]:
        left = iter(counts)
        return [planner.plan_with([next(left) for _ in planner.most]) for planner in planners]

    counts = counts_within(most, limit_s, lambda counts: sum(plan.total_s for plan in plans_with(counts)))
    return plans_with(counts)


def is_server(point: Point) -> bool:
    return point.task.program is not None


def print_settings(settings: Iterable[LocalSetting], console: Console) -> None:
    """What each setting needs of this machine's memory, and how it differs from the paper's."""
    for local in settings:
        fit, engine = local.fit, local.engine
        pools = [
            f"{blocks:,} KV blocks {blocks * fit.bytes_per_block / GIB:.2f} GiB"
            for blocks in (engine.num_gpu_blocks, engine.num_cpu_blocks)
        ]
        rest = f"activations {fit.activation_bytes / GIB:.2f}, reserved {fit.reserved_bytes / GIB:.2f} GiB"
        weights = f"weights {fit.weight_bytes / GIB:.2f} GiB"
        lines = [f"setting {local.name}: {local.title}, {engine.dtype}"]
        if local.card is None:
            lines.append(
                f"  host memory: {fit.host_bytes / GIB:.1f} GiB available; {weights}, {rest}; GPU tier {pools[0]}, "
                f"CPU tier {pools[1]}"
            )
        else:
            lines += [
                f"  {local.card.name}: {fit.device_bytes / GIB:.1f} GiB; {weights}, {rest}, {pools[0]} of at most "
                f"{fit.max_gpu_blocks:,}",
                f"  host memory: {fit.host_bytes / GIB:.1f} GiB available; {pools[1]}",
            ]
        lines += [f"  differs from the paper: {difference}" for difference in local.differences]
        for line in lines:
            print_line(console, line)


def print_plan(figure: str, plan: Plan, console: Console) -> None:
    """The points of a figure with their SIMULATED throughput and time, and the total."""
    titles = ("panel", "setting", "workload", "out", "req/s", "system", "requests", "SIMULATED tok/s", "time")
    lines = []
    for point in plan.points:
        lengths, values, rate = point.task.lengths, point.task.values, point.task.lengths.spec.request_rate
        lines.append(
            (
                values["panel"],
                values["setting"],
                lengths.spec.name,
                f"{lengths.mean_output_tokens:.0f}",
                "" if rate is None else f"{rate:g}",
                f"{point.task.system} (server)" if is_server(point) else point.task.system,
                str(lengths.spec.num_requests),
                number(values["predicted_output_tokens_per_s"], ".1f"),
                "-" if values["predicted_wall_s"] is None else format_s(values["predicted_wall_s"]),
            )
        )
    print_line(console, f"Plan of {figure}: points to measure")
    console.print(table(titles, lines, left=("panel", "setting", "workload", "system")))
    starts = f"{len(plan.start_s)} starts of engines and servers in {format_s(sum(plan.start_s.values()))}"
    predicted = f"predicted from this machine's own profile: {format_s(plan.total_s)} with {starts}"
    print_line(console, f"{len(plan.points)} points, {predicted}")
    for problem in plan.problems:
        print_line(console, f"not predicted: {problem}", "yellow")


# -- from options to plans --------------------------------------------------------------------------------------------

STALL_TIMEOUT_S = 600.0
"""At least this many seconds without progress are allowed: first steps may compile kernels for minutes."""


def measures_settings(options: FigureOptions, card: Card | None) -> bool:
    """Whether a paper's setting is measured rather than a small model with scaled lengths."""
    if options.setting is not None or options.rehearse:
        return options.setting != "small"
    return card is not None and options.device != "cpu"


def prepare(
    grid: Grid,
    options: FigureOptions,
    live: LiveSystems,
    console: Console,
    paper: Paper,
    row: tuple[str, ...],
    with_server: bool = True,
) -> Planner:
    """Choose the panels and settings that apply here, and measure the profiles that are not cached.

    Without ``with_server`` no vLLM server is started, even if vLLM is installed. ``row`` are fields of places for the
    rows.

    Raises:
        NotApplicable: the figure has no panel for this machine.
        ValueError: a setting does not fit this machine.
    """
    card = None if options.device == "cpu" else first_card()
    if card is None and options.device == "cuda":
        raise ValueError("--device cuda: nvidia-smi shows no GPU here")
    here = panels_to_measure(grid, options, card, paper)
    if options.scale:
        here = here.with_(scale=options.scale)
    here = with_output_lens(here, options.output_lens)
    places = here.places()
    papers = {setting.name: setting for setting in map(setting_of, places)}
    host_bytes = available_host_bytes()
    local = {name: local_setting(setting, card, host_bytes, options) for name, setting in papers.items()}
    systems = {place["system"] for place in places}
    vllm = vllm_here(systems, local, console) if with_server else None
    stall_timeout_s = max(STALL_TIMEOUT_S, options.stall_timeout_s)
    jobs = options.jobs or usable_cores()
    return Planner(here, local, profile_settings(local, live), vllm, stall_timeout_s, row, jobs)


def panels_to_measure(grid: Grid, options: FigureOptions, card: Card | None, paper: Paper) -> Grid:
    """The panels of the figure's grid that apply to this machine.

    Raises:
        NotApplicable: there is none.
    """
    if options.rehearse:
        return panels_for_rehearsal(grid)
    return panels_here(on_hosts_here(grid, host_memory_bytes()), options.setting, card, paper)


def vllm_here(systems: Collection[str], local: Mapping[str, LocalSetting], console: Console) -> Path | None:
    """The ``vllm`` command of this machine, if the systems have it; says what stands in for it where it is missing."""
    if VLLM not in systems:
        return None
    from evaluation.measure.vllm import how_to_install, vllm_program  # the HTTP client is needed only here

    device = next(iter(local.values())).engine.device
    program = vllm_program(device)
    if program is None:
        text = f"no vLLM here ({how_to_install(device)} installs it): `vllm` is our engine with vLLM's scheduling rules"
        print_line(console, text, "yellow")
    return program


def profile_settings(local: Mapping[str, LocalSetting], live: LiveSystems) -> dict[str, ProfiledMachine]:
    """This machine's profile for the engine of each setting.

    Raises:
        ValueError: the engine of a setting does not start here.
    """
    machines: dict[str, ProfiledMachine] = {}
    for name, setting in local.items():
        try:
            machines[name] = live.profile(setting.engine)
        except (InsufficientMemory, ChildEnded) as error:
            raise ValueError(f"the engine of setting {name} does not start here: {error}") from error
    return machines
