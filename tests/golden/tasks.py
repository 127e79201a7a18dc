"""A digest of every simulated point that the harness makes: what runs, on what machine, with which requests.

The commands run as a user types them, but for their points, which are only looked at. Nothing is simulated.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from enum import Enum
from importlib import import_module
from typing import Any
from unittest import mock

from apex.cli.parser import parse_options
from evaluation.drivers import SimulatedTask
from evaluation.run import Point
from tests.golden import record

QUICK = (
    "reproduce_fig5 --backend simulated --num-requests 40",
    "reproduce_fig5 --backend simulated --gpu a10 --sensitivity gpu_blocks=1650..3785 --num-requests 20",
    "reproduce_fig6 --backend simulated --num-requests 40 --gpu t4",
    "reproduce_fig7 --backend simulated --seed 7 --num-requests 40",
    "reproduce_neo --backend simulated --num-requests 20",
    "reproduce_adaptive --quick --set kernel=native hand_over_us=50.0 without=free-running",
    "reproduce_omniserve --quick --figure a10 a10-limits 13 18 19 --set seed=3",
    "compare_machines",
    "map_claims --quick",
)
"""Commands of ``evaluation/``, with options that change what runs. The tests look at these."""

THOROUGH = (
    "reproduce_fig5 --backend simulated",
    "reproduce_fig5 --backend simulated --gpu a10 --sensitivity cpu_bandwidth=179..231",
    "reproduce_fig6 --backend simulated",
    "reproduce_fig7 --backend simulated",
    "reproduce_neo --backend simulated",
    "reproduce_adaptive",
    "reproduce_adaptive --part map",
    "reproduce_adaptive --part wrong-tables",
    "reproduce_omniserve",
    "reproduce_weights",
)
"""The full sizes, minutes of a core: only ``python -m tests.golden.tasks`` looks at these."""


def digests(command: str) -> dict[str, str]:
    """Digest by experiment and key of each simulated point of a command."""
    name, *options = shlex.split(command)
    module = import_module(f"evaluation.{name}")
    points: dict[str, str] = {}

    def look_at(folder: Any, made: Sequence[Point], *_: Any) -> list[str]:
        for point in made:
            if isinstance(point.task, SimulatedTask):
                points[f"{folder.path.parent.name}/{point.key}"] = digest(point.task)
        return []

    with (
        undescribed(),
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, APEX_CACHE_DIR=folder),
        mock.patch("evaluation.study.run_unfinished_points", look_at),
    ):
        module.main(parse_options(module.Options, arguments=[*options, "--results-dir", folder]))
    return points


@contextlib.contextmanager
def undescribed() -> Iterator[None]:
    """Points are not described for their folder's provenance: a third of the time, and nobody reads it here."""
    modules = ("studies.figures", "study")
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch(f"evaluation.{module}.identity", lambda points: []))
        yield


def digest(task: SimulatedTask) -> str:
    """Of the system, its machine, limits, strategy and requests, and of what is known of its row."""
    machine = task.hardware
    tables = [_of_large(machine.table), task.believed and _of_large(task.believed)]
    weights = machine.weights and _of_large(machine.weights)
    rows = _of_requests(task.lengths.rows)
    plain = [
        task.system, machine.gpu, machine.model, machine.dtype, machine.num_layers, machine.launch_s, tables, weights,
        machine.interconnect and asdict(machine.interconnect), machine.remote_hosts and asdict(machine.remote_hosts),
        task.num_gpu_blocks, task.num_cpu_blocks, task.block_size, asdict(task.limits), asdict(task.strategy),
        task.one_class, task.duration_s, rows, dict(sorted(task.values.items())),
    ]  # fmt: skip
    return _hash(json.dumps(plain, default=_plain))


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value):
        return asdict(value)
    raise TypeError(f"{value!r} has no plain form")


_known: dict[int, tuple[Any, str]] = {}  # by id; the object is kept, so that no other takes its id


def _once(of_value: Callable[[Any], str]) -> Callable[[Any], str]:
    """Points share tables and requests: each is digested once."""

    @functools.wraps(of_value)
    def remembered(value: Any) -> str:
        if id(value) not in _known:
            _known[id(value)] = (value, of_value(value))
        return _known[id(value)][1]

    return remembered


@_once
def _of_requests(rows: Sequence[Any]) -> str:
    return _hash(repr([(r.input_tokens, r.output_tokens, r.arrival_s, r.service_class.value) for r in rows]))


@_once
def _of_large(value: Any) -> str:
    return _hash(json.dumps(_fields(value), default=_plain, sort_keys=True))


def _fields(value: Any) -> dict[str, Any]:
    """The fields that differ from their defaults: a new one that no task sets changes nothing."""
    values = {field: getattr(value, field.name) for field in fields(value)}
    return {field.name: one for field, one in values.items() if field.default is MISSING or one != field.default}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


if __name__ == "__main__":  # records anew, and says what changed
    known = record.read("tasks")
    for given in (*QUICK, *THOROUGH):
        now, before = digests(given), known.get(given, {})
        changed = [key for key in {**before, **now} if now.get(key) != before.get(key)]
        print(f"{given}: {len(now)} points, changed: {changed or 'nothing'}", file=sys.stderr, flush=True)
        record.write("tasks", known := {**known, given: now})
