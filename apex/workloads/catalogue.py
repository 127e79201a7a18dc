"""Request lengths and arrivals of the workloads, each with its origin.

A trace is read from a file if there is one, else drawn from quantile tables or a shape; its origin says which.
Everything is deterministic by seed.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import yaml

from apex.simulator.backend import PLACEHOLDER_TOKEN
from apex.source_tree import CONFIGS, python_command
from apex.workloads.files import Segments, TraceRow, read_rows
from apex.workloads.formats import read_file
from apex.workloads.sources import SOURCES, Source
from swiftllm.files import cache_dir, is_kept

WORKLOADS_FILE = CONFIGS / "experiments" / "workloads.yaml"

OriginKind = Literal["measured", "reconstructed", "synthetic", "fitted"]


@dataclass(frozen=True)
class Origin:
    """The origin of a trace: its kind, a note, and the file it was read from (None if drawn)."""

    kind: OriginKind
    note: str
    file: str | None = None


@dataclass(frozen=True)
class RecordedTrace:
    """A trace read from a file.

    Every kind of trace has ``sample``, rows representative of the whole trace in random order, and ``window``,
    consecutive rows with their arrivals, the first at 0; ValueError if it has no arrivals.
    """

    name: str
    title: str
    origin: Origin
    rows: tuple[TraceRow, ...]

    def sample(self, num_requests: int, seed: int) -> list[TraceRow]:
        """One random row from each of ``num_requests`` equal slices of the trace sorted by output length.

        The mean of a few dozen plain draws from a heavy tail varies widely; slices keep a short replay representative.
        With more requests than rows, the slices start over.
        """
        rng = np.random.default_rng(seed)
        order = sorted(range(len(self.rows)), key=lambda i: (self.rows[i].output_tokens, self.rows[i].input_tokens, i))
        chosen: list[TraceRow] = []
        while len(chosen) < num_requests:
            count = min(num_requests - len(chosen), len(order))
            edges = np.linspace(0, len(order), count + 1).astype(int)
            picks = [order[rng.integers(low, high)] for low, high in itertools.pairwise(edges)]
            chosen += [TraceRow(self.rows[i].input_tokens, self.rows[i].output_tokens) for i in picks]
        return [chosen[i] for i in rng.permutation(num_requests)]

    def window(self, num_requests: int, seed: int) -> list[TraceRow]:
        if any(row.arrival_s is None for row in self.rows):
            raise ValueError(f"trace {self.name} has no arrivals; give a request rate (Poisson) or send all at once")
        if num_requests > len(self.rows):
            raise ValueError(f"trace {self.name} has {len(self.rows)} rows, fewer than the {num_requests} asked for")
        start = int(np.random.default_rng(seed).integers(0, len(self.rows) - num_requests + 1))
        rows = self.rows[start : start + num_requests]
        return [replace(row, arrival_s=row.start_s - rows[0].start_s) for row in rows]


class Distribution(Protocol):
    """Of lengths in tokens."""

    def at(self, levels: np.ndarray) -> np.ndarray:
        """The lengths at levels between 0 and 1."""
        ...


@dataclass(frozen=True)
class Quantiles:
    """A distribution through points of (level in [0, 1], tokens)."""

    table: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        levels, tokens = (list(column) for column in zip(*self.table, strict=True))
        rises = levels == sorted(set(levels)) and tokens == sorted(tokens)
        if not rises or levels[0] != 0 or levels[-1] != 1:
            raise ValueError(f"quantiles must rise from level 0 to level 1: {self.table}")

    def at(self, levels: np.ndarray) -> np.ndarray:
        points, tokens = zip(*self.table, strict=True)
        return np.interp(levels, points, tokens)


@dataclass(frozen=True)
class LogNormal:
    """A log-normal distribution: its mean in tokens, the deviation of the logarithm, the longest length."""

    mean: float
    sigma: float
    longest: int

    def at(self, levels: np.ndarray) -> np.ndarray:
        normal = statistics.NormalDist(math.log(self.mean) - self.sigma**2 / 2, self.sigma)
        return np.array([min(math.exp(normal.inv_cdf(level)), self.longest) for level in levels.tolist()])


@dataclass(frozen=True)
class DrawnTrace:
    """Lengths drawn from two distributions, inputs and outputs independently.

    ``original`` names a published trace with arrivals, for scripts/download_traces.py; None if there is none.
    """

    name: str
    title: str
    origin: Origin
    inputs: Distribution
    outputs: Distribution
    original: str | None = None

    def sample(self, num_requests: int, seed: int) -> list[TraceRow]:
        """One draw from each of ``num_requests`` equal slices of both distributions, shuffled."""
        rng = np.random.default_rng(seed)
        columns = []
        for lengths in (self.inputs, self.outputs):
            levels = (np.arange(num_requests) + rng.random(num_requests)) / num_requests
            columns.append(np.maximum(1, np.rint(lengths.at(rng.permutation(levels)))).astype(int).tolist())
        return [TraceRow(given, out) for given, out in zip(*columns, strict=True)]

    def window(self, num_requests: int, seed: int) -> list[TraceRow]:
        command = f"{python_command()} scripts/download_traces.py {self.original}"
        fetch = f", or fetch them in the source tree: {command}" if self.original else ""
        raise ValueError(f"trace {self.name} is drawn and has no arrivals; give a request rate (Poisson){fetch}")


def synthetic_name(input_len: int) -> str:
    """The name of a synthetic workload with this average prompt length (tokens)."""
    return f"input-{input_len}"


@dataclass(frozen=True)
class UniformTrace:
    """Inputs and outputs drawn independently and uniformly within ``spread`` of their means (NEO section 5.1)."""

    input_len: int
    output_len: float
    spread: float = 0.1

    @property
    def name(self) -> str:
        return synthetic_name(self.input_len)

    @property
    def title(self) -> str:
        return f"input {self.input_len}"

    @property
    def origin(self) -> Origin:
        return Origin("synthetic", f"uniform within {self.spread:.0%} of the mean, inputs and outputs independent")

    def sample(self, num_requests: int, seed: int) -> list[TraceRow]:
        rng = np.random.default_rng(seed)
        low, high = 1 - self.spread, 1 + self.spread
        inputs, outputs = (mean * rng.uniform(low, high, num_requests) for mean in (self.input_len, self.output_len))
        pairs = zip(inputs.tolist(), outputs.tolist(), strict=True)
        return [TraceRow(max(1, round(given)), max(1, round(out))) for given, out in pairs]

    def window(self, num_requests: int, seed: int) -> list[TraceRow]:
        raise ValueError(f"synthetic workload {self.name} has no arrivals; give a request rate (Poisson)")


SYSTEM_TOKEN = 1 << 30
"""The token of system prompts. Those of messages are counted from 1."""


@dataclass(frozen=True)
class SessionTrace:
    """Conversations of ``turns`` turns: a request begins with what was said before, behind one system prompt.

    Each turn comes ``think_s`` seconds, on average, after the answer before it.
    The first turns come within the first ``think_s`` seconds. ``inputs`` are of a message, in tokens; the first message
    of each conversation is longer by ``opening_tokens``, such as the files that an agent reads. The history of a turn
    has the simulated outputs of earlier turns, which are all one token (``PLACEHOLDER_TOKEN``): a cache finds the
    blocks that decodes filled.
    """

    name: str
    title: str
    origin: Origin
    inputs: Distribution
    outputs: Distribution
    system_tokens: int
    turns: int
    think_s: float
    opening_tokens: int = 0

    def window(self, num_requests: int, seed: int) -> list[TraceRow]:
        """All turns of the first conversation, then those of the next one; the last conversation may be cut."""
        rng = np.random.default_rng([seed, 3])
        conversations = -(-num_requests // self.turns)
        shape = (conversations, self.turns)
        waits = rng.exponential(self.think_s, shape)
        waits[:, 0] = rng.permutation(np.linspace(0, self.think_s, conversations))
        lengths = []
        for side in (self.inputs, self.outputs):  # one draw from each of equal slices, as in drawn traces
            levels = rng.permutation((np.arange(waits.size) + rng.random(waits.size)) / waits.size)
            lengths.append(np.maximum(1, np.rint(side.at(levels))).astype(int).reshape(shape).tolist())
        rows: list[TraceRow] = []
        for given, out, gaps in zip(*lengths, waits.tolist(), strict=True):
            said: Segments = ((SYSTEM_TOKEN, self.system_tokens),)
            for turn in range(self.turns):
                said = (*said, (1 + len(rows), given[turn] + (0 if turn else self.opening_tokens)))
                after = len(rows) - 1 if turn else None
                size = sum(count for _, count in said)
                rows.append(TraceRow(size, out[turn], gaps[turn], segments=said, after=after))
                said = (*said, (PLACEHOLDER_TOKEN, out[turn]))
        return rows[:num_requests]

    def sample(self, num_requests: int, seed: int) -> list[TraceRow]:
        """The same requests, each for itself."""
        return [TraceRow(row.input_tokens, row.output_tokens) for row in self.window(num_requests, seed)]


def turns_of(rows: Sequence[TraceRow]) -> list[int]:
    """The turn of each request, from 1."""
    turns: list[int] = []
    for row in rows:
        turns.append(1 if row.after is None else turns[row.after] + 1)
    return turns


Trace = RecordedTrace | DrawnTrace | UniformTrace | SessionTrace


def trace_dirs(first: Path | None = None) -> list[Path]:
    """Folders that may hold trace files, in search order."""
    fetched = cache_dir() / "traces"
    return [first, fetched] if first else [fetched]


@functools.cache
def load_catalogue() -> dict[str, Any]:
    """The workloads by name, as described in configs/experiments/workloads.yaml."""
    return yaml.safe_load(WORKLOADS_FILE.read_text())


def load_trace(name: str, trace_dir: Path | None = None, tokenizer: Path | None = None) -> Trace:
    """The trace of a workload: the first file in the trace folders, else its quantile tables or its shape.

    Args:
        name: of a workload of the catalogue; or a file of one's own, see :func:`apex.workloads.formats.read_file`.
        tokenizer: counts the tokens of a file of texts.

    Raises:
        ValueError: there is no such name and no such file, a file is damaged (the message names its line), or
            ``trace_dir`` is given and does not exist.
    """
    if name not in load_catalogue():
        if (path := Path(name).expanduser()).is_file():
            return own_trace(path, tokenizer)
        near = difflib.get_close_matches(name.lower(), load_catalogue(), n=3, cutoff=0.4)
        advice = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(
            f"unknown workload {name!r}, and no such file is here; known: {', '.join(load_catalogue())}{advice}"
        )
    if trace_dir is not None and not trace_dir.is_dir():
        raise ValueError(f"trace folder {trace_dir} does not exist")
    entry = load_catalogue()[name]
    for folder in trace_dirs(trace_dir):
        for source in entry["sources"]:
            path = folder / source["file"]
            if is_kept(path):
                origin = Origin(source["kind"], source["note"] + _counted(path), source["file"])
                return RecordedTrace(name, entry["title"], origin, read_rows(path))
    sides = ("input_tokens", "output_tokens")
    if shape := entry.get("lognormal"):
        origin, (inputs, outputs) = Origin("synthetic", shape["note"]), (LogNormal(**shape[side]) for side in sides)
        if sessions := entry.get("sessions"):
            return SessionTrace(name, entry["title"], origin, inputs, outputs, **sessions)
        return DrawnTrace(name, entry["title"], origin, inputs, outputs)
    fitted = entry["fitted"]
    inputs, outputs = (Quantiles(tuple((level, tokens) for level, tokens in fitted[side])) for side in sides)
    if sessions := entry.get("sessions"):
        return SessionTrace(name, entry["title"], Origin("synthetic", fitted["note"]), inputs, outputs, **sessions)
    original = next((source.name for source in fetchable(name) if source.has_arrivals), None)
    return DrawnTrace(name, entry["title"], Origin("fitted", fitted["note"]), inputs, outputs, original)


def own_trace(path: Path, tokenizer: Path | None = None) -> RecordedTrace:
    """The trace in a file of one's own."""
    rows, remark = read_file(path, tokenizer)
    note = f"{len(rows)} requests of the file {path.name}" + (f"; {remark}" if remark else "")
    return RecordedTrace(path.stem, path.stem, Origin("measured", note, path.name), rows)


def _counted(path: Path) -> str:
    """Whose tokens the lengths of a fetched text are, for the note of its origin; empty where no text was counted."""
    provenance = path.with_suffix(".json")
    of_text = {source.file for source in SOURCES if source.counted is None}
    if path.name not in of_text or not provenance.is_file():
        return ""
    return f"; tokens counted by {json.loads(provenance.read_text())['tokens_counted_by']}"


def fetchable(name: str) -> list[Source]:
    """The published traces of a workload that scripts/download_traces.py fetches."""
    files = {source["file"] for source in load_catalogue()[name]["sources"]}
    return [source for source in SOURCES if source.file in files]
