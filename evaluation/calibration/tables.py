"""The measured tables that hardware files are calibrated with, from Vidur (MIT) and forks of it.

`mlp_<gpu>_<model>_tp1.csv` has columns op, num_tokens, time_ms: operations of one layer in fp16. The attention tables
have batch_size, num_tokens, context_tokens, time_ms. docs/simulator.md describes how to make them from the public
files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from apex.perf.model import Curve
from apex.simulator.hardware.files import LayerShape, MeasuredLayer


def compact_curve(sizes: Sequence[float], seconds: Sequence[float], num_points: int) -> Curve:
    """The curve through ``num_points`` of the measured points that minimises the sum of relative errors at all points.

    Dynamic programming chooses the points, so a jump in the data keeps a point on either side. The first and the last
    point always stay. Values are made ascending first, as in every curve.
    """
    x, measured = np.asarray(sizes, float), np.asarray(seconds, float)
    y = np.asarray(Curve(tuple(x), tuple(measured)).seconds)
    count = len(x)
    if num_points >= count:
        return Curve(tuple(x), tuple(y))
    # cost[i, j]: relative errors at the points from i to before j if a straight line joins points i and j.
    cost = np.full((count, count), np.inf)
    for i in range(count - 1):
        slopes = (y[i + 1 :] - y[i]) / (x[i + 1 :] - x[i])
        lines = y[i] + slopes[:, None] * (x[None, i:] - x[i])
        sums = np.cumsum(np.abs(lines / measured[None, i:] - 1), axis=1)
        cost[i, i + 1 :] = sums[np.arange(count - 1 - i), np.arange(count - 1 - i)]
    best, came_from = cost[0].copy(), []
    for _ in range(num_points - 2):
        through = best[:, None] + cost
        came_from.append(through.argmin(axis=0))
        best = through.min(axis=0)
    kept = [count - 1]
    for step in reversed(came_from):
        kept.append(int(step[kept[-1]]))
    kept = [0, *reversed(kept)]
    return Curve(tuple(x[kept]), tuple(y[kept]))


def fit_terms(terms: Sequence[Sequence[float]], seconds: Sequence[float], rounds: int = 80) -> np.ndarray:
    """Coefficients of the terms whose sum has the least mean absolute relative error (reweighted least squares)."""
    columns, target = np.stack([np.asarray(term, float) for term in terms], axis=1), np.asarray(seconds, float)
    weights = 1 / target
    for _ in range(rounds):
        coefficients = np.linalg.lstsq(columns * weights[:, None], target * weights, rcond=None)[0]
        errors = np.abs(columns @ coefficients / target - 1)
        weights = 1 / target / np.sqrt(np.maximum(errors, 1e-3))
    return coefficients


# -- tables ------------------------------------------------------------------------------------------------------------


GEMMS = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
# A layer adds its residual twice; the table times one addition.
ELEMENTWISE = {
    "input_layernorm": 1, "post_attention_layernorm": 1, "attn_rope": 1, "mlp_act": 1, "add": 2,
}  # fmt: skip
GEMM_POINTS, ELEMENTWISE_POINTS = 32, 12
LLAMA_2_7B, LLAMA_3_8B = LayerShape(4096, 11008, 32, 32, 128), LayerShape(4096, 14336, 32, 8, 128)
QWEN_2_7B = LayerShape(3584, 18944, 28, 4, 128)
VIDUR, THIRD_PARTY = "microsoft/vidur @ 7d475133", "third-party measurement in a fork of Vidur, "
LAYER_TABLES = {
    ("t4", "Llama-2-7b-hf"): (LLAMA_2_7B, THIRD_PARTY + "akaashrp/vidur @ 08dd3601"),
    ("a10", "Llama-2-7b-hf"): (LLAMA_2_7B, THIRD_PARTY + "pouyahmdn/vidur @ d0ef4c09"),
    ("a10", "Meta-Llama-3-8B"): (LLAMA_3_8B, THIRD_PARTY + "pouyahmdn/vidur @ d0ef4c09"),
    ("a40", "Llama-2-7b-hf"): (LLAMA_2_7B, VIDUR),
    ("a100", "Llama-2-7b-hf"): (LLAMA_2_7B, VIDUR),
    ("h100", "Llama-2-7b-hf"): (LLAMA_2_7B, VIDUR),
}
SHORT_NAMES = {"Llama-2-7b-hf": "llama-2-7b", "Meta-Llama-3-8B": "llama-3-8b"}
ATTENTION_TABLES = {
    "a30": ("attention_a30_Qwen-2-7B_tp1.csv", QWEN_2_7B),
    "a40": ("attention_a40_Llama-2-7b-hf_tp1_partial.csv", LLAMA_2_7B),
}


@dataclass(frozen=True)
class LayerTable:
    """Seconds of one layer's operations over tokens, as measured."""

    gpu: str
    model: str
    shape: LayerShape
    origin: str
    tokens: np.ndarray
    ops: Mapping[str, np.ndarray]

    @property
    def gemm(self) -> np.ndarray:
        return sum(self.ops[op] for op in GEMMS)

    @property
    def elementwise(self) -> np.ndarray:
        return sum(times * self.ops[op] for op, times in ELEMENTWISE.items())

    def fit(self, rows: np.ndarray) -> MeasuredLayer:
        """The compact curves fitted to these rows (a boolean mask)."""
        gemm = compact_curve(self.tokens[rows], self.gemm[rows], GEMM_POINTS)
        elementwise = compact_curve(self.tokens[rows], self.elementwise[rows], ELEMENTWISE_POINTS)
        return MeasuredLayer(self.model, self.shape, gemm, elementwise, self.origin)


def read_layer_tables(folder: Path) -> list[LayerTable]:
    tables = []
    for (gpu, model), (shape, origin) in LAYER_TABLES.items():
        frame = read_table(folder / f"mlp_{gpu}_{model}_tp1.csv")
        times = frame.pivot_table("seconds", "num_tokens", "op", aggfunc="last").dropna(subset=[*GEMMS, *ELEMENTWISE])
        columns = {op: times[op].to_numpy(copy=True) for op in times}
        tables.append(LayerTable(gpu, model, shape, origin, times.index.to_numpy(), columns))
    return tables


def read_table(path: Path) -> pd.DataFrame:
    """A measured table, with ``seconds`` in place of milliseconds.

    Raises:
        FileNotFoundError: there is none; the message says what to do.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: name the folder that has it with --tables; docs/simulator.md names its origin"
        )
    frame = pd.read_csv(path)
    return frame.assign(seconds=frame["time_ms"] * 1e-3)
