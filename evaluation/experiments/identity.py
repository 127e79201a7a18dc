"""What decides the numbers of points, as JSON for the identity of a run.

A task is described by its fields, but for timeouts, which decide no numbers, and for fields that are not compared
(``field(compare=False)``).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import FunctionType
from typing import Any

from apex.perf.model import ProfileTable
from apex.workloads.requests import Lengths
from evaluation.experiments.runner import Point
from evaluation.results.provenance import fingerprint
from swiftllm.config import EngineConfig


def identity(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Everything that decides the numbers of points, but for the model folders of those that are measured."""
    return [{"key": point.key, "task": plain(point.task)} for point in points]


@functools.singledispatch
def plain(value: Any) -> Any:
    """A value as JSON values; a digest of what is large.

    Raises:
        TypeError: it is of no kind that this module knows.
    """
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [plain(one) for one in value]
    if is_dataclass(value):
        names = [field.name for field in fields(value) if field.compare and not field.name.endswith("timeout_s")]
        return {name: plain(getattr(value, name)) for name in names}
    raise TypeError(f"{type(value).__name__} has no plain form")


@plain.register
def _(path: Path) -> str:
    return path.name


@plain.register
def _(table: ProfileTable) -> dict[str, Any]:
    return {**table.identity, "times": fingerprint(asdict(table))}


@plain.register
def _(lengths: Lengths) -> dict[str, Any]:
    return lengths.identity


@plain.register
def _(function: FunctionType) -> str:
    return function.__qualname__


@plain.register
def _(engine: EngineConfig) -> dict[str, Any]:
    return {name: value for name, value in asdict(engine).items() if name != "model"}
