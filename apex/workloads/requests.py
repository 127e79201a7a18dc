"""Workloads: requests with real prompts, forced output lengths and arrivals, ready to be replayed."""

from __future__ import annotations

import ast
import functools
import hashlib
import itertools
import json
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from apex.replay.records import ReplayRequest
from apex.simulator.backend import PLACEHOLDER_TOKEN
from apex.workloads.catalogue import Origin, Trace, TraceRow
from apex.workloads.files import Segments
from swiftllm.core.request import ServiceClass

Arrivals = Literal["at-once", "trace", "poisson", "closed-loop"]


@dataclass(frozen=True)
class WorkloadSpec:
    """Describes the requests of a workload. All fields decide the result, so all are part of a run's identity."""

    name: str
    """A workload of configs/experiments/workloads.yaml, or the name of a synthetic trace or of one's own."""
    num_requests: int
    scale: float = 1.0
    """Factor for input and output lengths (rounded, at least 1 token)."""
    output_len: float | None = None
    """Average output tokens before scaling; None leaves the trace's own lengths."""
    arrivals: Arrivals = "at-once"
    request_rate: float | None = None
    """Requests per second of Poisson arrivals."""
    concurrency: int | None = None
    """Requests in flight in a closed loop: the next one is sent when one has ended."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_requests", "concurrency"):
            if (count := getattr(self, name)) is not None and count < 1:
                raise ValueError(f"{name}={count} must be at least 1")
        for name in ("scale", "output_len", "request_rate"):
            if (size := getattr(self, name)) is not None and size <= 0:
                raise ValueError(f"{name}={size} must be above 0")
        if (self.arrivals == "poisson") != (self.request_rate is not None):
            raise ValueError("request_rate goes with Poisson arrivals, and only with them")
        if (self.arrivals == "closed-loop") != (self.concurrency is not None):
            raise ValueError("concurrency goes with a closed loop, and only with it")


@dataclass(frozen=True)
class Lengths:
    """A workload without prompts: one row per request, arrivals in seconds from the start."""

    spec: WorkloadSpec
    title: str
    origin: Origin
    rows: tuple[TraceRow, ...]
    best_effort: WorkloadSpec | None = None
    """What the best-effort rows were drawn from, if there are any; ``spec`` is then that of the others."""

    @property
    def mean_input_tokens(self) -> float:
        return float(np.mean([row.input_tokens for row in self.rows]))

    @property
    def mean_output_tokens(self) -> float:
        return float(np.mean([row.output_tokens for row in self.rows]))

    @property
    def total_output_tokens(self) -> int:
        return sum(row.output_tokens for row in self.rows)

    @property
    def are_shared(self) -> bool:
        """Whether prompts begin as others do."""
        return any(row.segments for row in self.rows)

    @property
    def span_s(self) -> float:
        """Seconds over which requests arrive; 0 where they are all there from the start, or follow answers."""
        return 0.0 if any(row.after is not None for row in self.rows) else max(row.start_s for row in self.rows)

    @property
    def identity(self) -> dict[str, Any]:
        """What decides a result of these requests, for the identity of a run."""
        return {"workload": asdict(self.spec), "trace": {**asdict(self.origin), "lengths": self.digest()}}

    def digest(self) -> str:
        """A hash of the lengths, arrivals and classes."""
        text = json.dumps([row_values(row) for row in self.rows])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def row_values(row: TraceRow) -> dict[str, Any]:
    """A row as JSON values. What it shares, what it follows, and its class are left out where they are the default."""
    values = asdict(row)
    for name in ("segments", "after"):
        if getattr(row, name) in ((), None):
            del values[name]
    service_class = values.pop("service_class")
    return values if service_class is ServiceClass.LATENCY_SENSITIVE else values | {"class": service_class.value}


@dataclass(frozen=True)
class Workload:
    lengths: Lengths
    requests: tuple[ReplayRequest, ...]


def make_lengths(spec: WorkloadSpec, trace: Trace) -> Lengths:
    """Draw the workload's lengths and arrivals from its trace.

    With the trace's own arrivals prompts share what the trace says, and turns follow answers. With drawn arrivals each
    request is for itself.

    Raises:
        ValueError: the trace has no arrivals of its own, or its turns cannot be scaled.
    """
    rows = (trace.window if spec.arrivals == "trace" else trace.sample)(spec.num_requests, spec.seed)
    is_as_recorded = spec.scale == 1.0 and spec.output_len is None
    if not is_as_recorded and any(row.after is not None for row in rows):
        raise ValueError(f"workload {spec.name} has conversations, whose lengths cannot be changed")
    output_factor = spec.scale
    if spec.output_len is not None:
        output_factor *= spec.output_len / float(np.mean([row.output_tokens for row in rows]))
    if spec.request_rate is not None:
        rng = np.random.default_rng([spec.seed, 1])
        gaps = rng.exponential(1.0 / spec.request_rate, spec.num_requests)
        arrivals = np.cumsum(gaps) - gaps[0]
    else:
        arrivals = [row.start_s for row in rows]
    scaled = tuple(
        TraceRow(
            input_tokens=max(1, round(row.input_tokens * spec.scale)),
            output_tokens=max(1, round(row.output_tokens * output_factor)),
            arrival_s=float(arrival),
            segments=row.segments if is_as_recorded else (),
            after=row.after,
        )
        for row, arrival in zip(rows, arrivals, strict=True)
    )
    return Lengths(spec, trace.title, trace.origin, scaled)


def merge_lengths(latency_sensitive: Lengths, best_effort: Lengths) -> Lengths:
    """Two streams as one, in order of arrival: the second's requests are best-effort.

    Raises:
        ValueError: one of the streams is a closed loop, or has turns that follow answers: these have no arrivals.
    """
    for stream in (latency_sensitive, best_effort):
        if stream.spec.arrivals == "closed-loop" or any(row.after is not None for row in stream.rows):
            why = "a closed loop has no arrivals, nor have turns that follow answers: they cannot be merged"
            raise ValueError(f"{stream.spec.name}: {why}")
    less_urgent = [replace(row, service_class=ServiceClass.BEST_EFFORT) for row in best_effort.rows]
    rows = sorted([*latency_sensitive.rows, *less_urgent], key=lambda row: row.start_s)
    title = f"{latency_sensitive.title} beside best-effort {best_effort.title}"
    return replace(latency_sensitive, title=title, rows=tuple(rows), best_effort=best_effort.spec)


def make_workload(lengths: Lengths, prompt_tokens: PromptTokens) -> Workload:
    """Give each request of ``lengths`` its prompt."""
    return with_prompts(
        lengths, prompts_of(lengths.rows, lambda sizes: prompt_tokens.prompts(sizes, lengths.spec.seed))
    )


def prompts_of(
    rows: Sequence[TraceRow], texts: Callable[[Sequence[int]], Sequence[tuple[int, ...]]]
) -> list[tuple[int, ...]]:
    """The prompts of rows, which begin alike where their segments do.

    ``texts`` makes different texts of these lengths, as token ids. The first one stands for the answers of simulations,
    if prompts have any: all of its ids must be ``PLACEHOLDER_TOKEN`` where these are to be found in a cache.
    """
    longest: dict[int, int] = {}  # by segment; what a row has beside its segments is one of its own, below 0
    parts: list[Segments] = []
    if any(token == PLACEHOLDER_TOKEN for row in rows for token, _ in row.segments):
        longest[PLACEHOLDER_TOKEN] = 0
    for place, row in enumerate(rows):
        left = row.input_tokens - sum(count for _, count in row.segments)
        parts.append((*row.segments, (-1 - place, left)) if left > 0 else row.segments)
        for token, count in parts[-1]:
            longest[token] = max(count, longest.get(token, 0))
    text_of = dict(zip(longest, texts(list(longest.values())), strict=True))
    return [
        tuple(itertools.chain.from_iterable(text_of[token][:count] for token, count in some))[: row.input_tokens]
        for row, some in zip(rows, parts, strict=True)
    ]


def with_prompts(lengths: Lengths, prompts: Iterable[tuple[int, ...]]) -> Workload:
    requests = tuple(
        ReplayRequest(
            f"{lengths.spec.name}-{index}",
            row.start_s,
            prompt,
            row.output_tokens,
            row.service_class,
            None if row.after is None else f"{lengths.spec.name}-{row.after}",
        )
        for index, (row, prompt) in enumerate(zip(lengths.rows, prompts, strict=True))
    )
    return Workload(lengths, requests)


@dataclass(frozen=True)
class PromptTokens:
    """Source of prompts: real text in the model's tokens, or random ids without a text."""

    vocab_size: int
    text_ids: tuple[int, ...] | None = None

    @property
    def kind(self) -> str:
        return "random token ids" if self.text_ids is None else "documentation of Python's standard library"

    def prompts(self, lengths: Sequence[int], seed: int) -> list[tuple[int, ...]]:
        """One prompt per length, each from its own place of the text, which wraps around at its end."""
        rng = np.random.default_rng([seed, 2])
        if self.text_ids is None:
            return [tuple(rng.integers(0, self.vocab_size, length).tolist()) for length in lengths]
        size = len(self.text_ids)
        if len(lengths) > size:
            raise ValueError(f"{len(lengths)} prompts are more than the text's {size} tokens can begin differently")
        # One start in each equal slice of the text, so that short prompts do not overlap.
        edges = np.linspace(0, size, len(lengths) + 1).astype(int)
        starts = rng.permutation([rng.integers(low, high) for low, high in itertools.pairwise(edges)])
        return [
            tuple(self.text_ids[(start + offset) % size] for offset in range(length))
            for start, length in zip(starts.tolist(), lengths, strict=True)
        ]


@functools.cache
def load_prompt_tokens(model: Path) -> PromptTokens:
    """The corpus in the tokens of a Hugging Face model folder; random ids if it has no tokenizer.json.

    Raises:
        FileNotFoundError: the folder has no config.json.
    """
    vocab_size = int(json.loads((model / "config.json").read_text())["vocab_size"])
    tokenizer_file = model / "tokenizer.json"
    if not tokenizer_file.is_file():
        return PromptTokens(vocab_size)
    from swiftllm.model.tokenizer import read_tokenizer  # slow to import, and only needed here

    ids = read_tokenizer(tokenizer_file).encode(load_corpus(), add_special_tokens=False).ids
    return PromptTokens(vocab_size, tuple(ids))


# -- text for prompts that exists on every machine ---------------------------------------------------------------------

MODULES = (
    "argparse", "ast", "asyncio/base_events", "asyncio/events", "calendar", "collections/__init__",
    "concurrent/futures/_base", "contextlib", "datetime", "difflib", "doctest", "email/message", "enum",
    "fractions", "functools", "http/client", "http/server", "imaplib", "inspect", "ipaddress", "json/__init__",
    "logging/__init__", "mailbox", "optparse", "os", "pathlib", "pickle", "pickletools", "pydoc", "random",
    "re/__init__", "shelve", "shutil", "smtplib", "socket", "statistics", "subprocess", "tarfile", "tempfile",
    "textwrap", "threading", "timeit", "traceback", "turtle", "typing", "unittest/case", "unittest/mock",
    "urllib/parse", "urllib/request", "uuid", "weakref", "zipfile",
)  # fmt: skip
"""Of Python's standard library. Their sources are read (not imported) in this order, so one Python version always gives
the same text: about 600,000 characters of English prose."""


@functools.cache
def load_corpus() -> str:
    """All documentation strings of MODULES, in order of appearance, separated by blank lines.

    Raises:
        FileNotFoundError: this Python has no sources of its library.
    """
    library = Path(sysconfig.get_path("stdlib"))
    texts: list[str] = []
    for module in MODULES:
        source = library / f"{module}.py"
        if source.is_file():  # Python versions differ in their modules
            texts += docstrings(source.read_text(encoding="utf-8"))
    if not texts:
        raise FileNotFoundError(f"no Python sources in {library} to take prompt text from; use --load-format dummy")
    return "\n\n".join(texts)


def docstrings(source: str) -> list[str]:
    """The documentation strings of a module's source, from top to bottom."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    return [text for node in nodes if (text := ast.get_docstring(node))]
