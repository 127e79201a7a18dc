"""Assumptions on which a figure's ratios depend, and how they are varied (``--sensitivity``).

What matters most of the papers' machines is not stated for the runs of their figures: how fast CPU attention reads the
KV cache, in absolute terms or as a share of the GPU's speed, how much faster APEX's kernel is than NEO's, and how many
KV blocks the GPU holds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from evaluation.results.folder import FlatRecord

STEPS = 8


@dataclass(frozen=True)
class Assumption:
    """One figure of a :class:`~apex.simulator.paper_settings.PaperSetting` that can be replaced.

    ``name`` is its name on the command line and in a row's ``sensitivity``; ``field`` is the field of its value.
    ``words`` and ``unit`` name it in figures, ``column`` in tables, ``tag`` and ``unit`` in keys and labels of points.
    The field is an axis of ``evaluation/grid.py``. A system that does not depend on it runs once, with an
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


ASSUMPTIONS = {
    "cpu_bandwidth": Assumption(
        "cpu_bandwidth", "cpu_bandwidth_gb_s", "the speed of CPU attention", "GB/s of CPU attention", "CPU GB/s", "cpu"
    ),
    "gpu_blocks": Assumption(
        "gpu_blocks",
        "num_gpu_blocks",
        "the size of the GPU's KV pool",
        "KV blocks of 16 tokens on the GPU",
        "blocks",
        "blocks",
    ),
    "cpu_share": Assumption(
        "cpu_share",
        "cpu_of_gpu_attention",
        "the CPU's share of the GPU's speed",
        "of the GPU's rate of attention, with APEX's kernel",
        "CPU/GPU",
        "share",
    ),
    "kernel_ratio": Assumption(
        "kernel_ratio", "kernel_ratio", "APEX's CPU kernel", "times as fast as NEO's kernel", "kernel", "kernel"
    ),
}


def varied_in(records: Iterable[FlatRecord]) -> Assumption | None:
    """The assumption that a run varied, read from its rows; None for a run of the figure itself."""
    return ASSUMPTIONS.get(next(iter(records)).get("sensitivity"))


def parse_sensitivity(text: str) -> tuple[Assumption, tuple[float, ...]]:
    """``NAME=LOW..HIGH`` as values: both ends, and numbers of two digits between them, evenly spaced on a logarithmic
    axis.

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
    return ASSUMPTIONS[name], (low, *sorted({value for value in between if low < value < high}), high)


def _two_digits(value: float) -> float:
    return round(value, 1 - math.floor(math.log10(value)))
