"""Assumptions on which a figure's ratios depend, and how they are varied (``--sensitivity``).

The papers do not state two values of their machines, and these matter most: how fast CPU attention reads the KV cache,
and how many KV blocks the GPU holds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from apex.simulator.paper_settings import PaperSetting
from evaluation.results.folder import FlatRecord

STEPS = 8


@dataclass(frozen=True)
class Assumption:
    """One figure of a :class:`~apex.simulator.paper_settings.PaperSetting` that can be replaced.

    ``name`` is its name on the command line and in a row's ``sensitivity``; ``field`` is the field of its value.
    ``words`` and ``unit`` name it in figures, ``column`` in tables, ``tag`` and ``unit`` in keys and labels of points.
    The field is an axis of ``evaluation/experiments/axes.py``. A system that does not depend on it runs once, with an
    empty field.
    """

    name: str
    field: str
    words: str
    unit: str
    column: str
    tag: str

    @property
    def axis(self) -> str:
        return f"{self.unit} (assumed)"


@dataclass(frozen=True)
class Variation:
    """An assumption and its values."""

    assumption: Assumption
    values: tuple[float, ...]


def check_blocks(variation: Variation, settings: Iterable[PaperSetting]) -> None:
    """Check that a varied GPU pool holds the longest request of each setting.

    Raises:
        ValueError: a setting's longest request needs more blocks.
    """
    for setting in settings:
        if variation.assumption == GPU_BLOCKS and variation.values[0] < setting.min_gpu_blocks:
            raise ValueError(
                f"--sensitivity gpu_blocks: {setting.title} needs {setting.min_gpu_blocks} blocks for its longest "
                "request; begin there, or choose another machine with --gpu"
            )


CPU_BANDWIDTH = Assumption(
    name="cpu_bandwidth",
    field="cpu_bandwidth_gb_s",
    words="the speed of CPU attention",
    unit="GB/s of CPU attention",
    column="CPU GB/s",
    tag="cpu",
)
GPU_BLOCKS = Assumption(
    name="gpu_blocks",
    field="num_gpu_blocks",
    words="the size of the GPU's KV pool",
    unit="KV blocks of 16 tokens on the GPU",
    column="blocks",
    tag="blocks",
)
ASSUMPTIONS = {assumption.name: assumption for assumption in (CPU_BANDWIDTH, GPU_BLOCKS)}


def varied_in(records: Iterable[FlatRecord]) -> Assumption | None:
    """The assumption that a run varied, read from its rows; None for a run of the figure itself."""
    return ASSUMPTIONS.get(next(iter(records)).get("sensitivity"))


def parse_sensitivity(text: str) -> Variation:
    """``NAME=LOW..HIGH``: both ends, and values of two digits between them, evenly spaced on a logarithmic axis.

    Raises:
        ValueError: the text has another form, or the name is unknown; the message shows what is valid.
    """
    match = re.fullmatch(r"(\w+)=([\d.]+)\.\.([\d.]+)", text)
    try:
        name, low, high = match[1], float(match[2]), float(match[3])
    except (TypeError, ValueError):
        raise ValueError(f"--sensitivity {text!r}: write it as NAME=LOW..HIGH, like cpu_bandwidth=20..300") from None
    if name not in ASSUMPTIONS:
        raise ValueError(f"--sensitivity {name}: what can be varied is {', '.join(ASSUMPTIONS)}")
    if not 0 < low < high:
        raise ValueError(f"--sensitivity {text!r}: the range must rise from above 0")
    between = (_two_digits(low * (high / low) ** (step / (STEPS - 1))) for step in range(1, STEPS - 1))
    return Variation(ASSUMPTIONS[name], (low, *sorted({value for value in between if low < value < high}), high))


def _two_digits(value: float) -> float:
    return round(value, 1 - math.floor(math.log10(value)))
