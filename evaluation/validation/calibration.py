"""Fits hardware files to measured tables of operator times, and says how well the fits predict rows they have not seen.

The tables are from Vidur (MIT) and forks of it. `mlp_<gpu>_<model>_tp1.csv` has columns op, num_tokens, time_ms:
operations of one layer in fp16. The attention tables have batch_size, num_tokens, context_tokens, time_ms.
docs/simulator.md describes how to make them from the public files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import pandas as pd
import yaml

from apex.perf.model import Curve
from apex.simulator.hardware_files import Gpu, LayerShape, MeasuredLayer, load_gpu
from apex.simulator.predicted_profile import gpu_attention_s, linear_curve, prefill_attention_s
from evaluation.results.folder import FlatRecord
from swiftllm.files import write_atomically

ITEMSIZE = 2

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


# -- fits -------------------------------------------------------------------------------------------------------------


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


# -- errors -----------------------------------------------------------------------------------------------------------


def held_out(num_rows: int) -> np.ndarray:
    """Mask of the held-out rows: every third one, beginning with the third."""
    return np.arange(num_rows) % 3 == 2


def layer_errors(table: LayerTable) -> list[FlatRecord]:
    """Fit each operation, and the layer as in the hardware files, to two thirds of the rows; predict the rest."""
    test = held_out(len(table.tokens))
    fitted = table.fit(~test)
    curves: dict[str, tuple[Callable[[float], float], np.ndarray]] = {
        op: (compact_curve(table.tokens[~test], table.ops[op][~test], GEMM_POINTS), table.ops[op]) for op in GEMMS
    }
    curves["elementwise operations"] = (fitted.elementwise, table.elementwise)
    curves["layer"] = (lambda n: fitted.gemm(n) + fitted.elementwise(n), table.gemm + table.elementwise)
    return [
        _errors(table.gpu, table.model, op, "held-out third", map(curve, table.tokens[test]), measured[test])
        for op, (curve, measured) in curves.items()
    ]


def transfer_errors(tables: Sequence[LayerTable]) -> list[FlatRecord]:
    """Errors of a layer predicted from the same card's table of another model, and from data sheets alone.

    "other cards' fractions" are the medians of the other cards, as for an unmeasured card.
    """
    records = []
    for table in tables:
        gpu, measured = load_gpu(table.gpu), table.gemm + table.elementwise
        others = [t.fit(np.ones(len(t.tokens), bool)) for t in tables if t.gpu == table.gpu and t.model != table.model]
        predictors = {f"scaled from {other.model}": replace(gpu, layers=(other,)) for other in others}
        cards = {other.gpu: load_gpu(other.gpu) for other in tables if other.gpu != table.gpu}.values()
        names = ("weight_read_fraction", "gemm_fraction")
        fractions = {name: median(card[name] for card in cards) for name in names}
        predictors["data sheet, its own fractions"] = replace(gpu, layers=())
        predictors["data sheet, other cards' fractions"] = with_figures(replace(gpu, layers=()), fractions)
        for method, predictor in predictors.items():
            curve = linear_curve(predictor, table.shape, ITEMSIZE, int(table.tokens[-1]))
            records.append(_errors(table.gpu, table.model, "layer", method, map(curve, table.tokens), measured))
    return records


def attention_errors(folder: Path) -> tuple[list[FlatRecord], dict[str, dict[str, float]]]:
    """Errors of attention fitted to two thirds of the rows, and with the figures assumed for unmeasured cards.

    Returns:
        The errors, and the figures fitted to all rows by GPU.
    """
    records, figures = [], {}
    # The A100 has no measured attention figures, so its file holds those assumed for unmeasured cards.
    assumed = {key: figure.value for key, figure in load_gpu("a100").figures.items() if "_attention_" in key}
    for name, (file, shape) in ATTENTION_TABLES.items():
        gpu, frame, model = load_gpu(name), read_table(folder / file), file.split("_")[2]
        figures[name] = {}
        for op, first, fit, predict in (
            ("attn_decode", "batch_size", fit_decode, gpu_attention),
            ("attn_prefill", "num_tokens", fit_prefill, prefill_attention),
        ):
            rows = frame.loc[frame["op"] == op, [first, "context_tokens", "seconds"]].astype(float).to_numpy()
            if not len(rows):
                continue
            test = held_out(len(rows))
            for method, chosen, held in (
                ("held-out third", fit(gpu, shape, *rows[~test].T), rows[test]),
                ("figures assumed for other cards", assumed, rows),
            ):
                seconds = predict(with_figures(gpu, chosen), shape, *held[:, :2].T)
                records.append(_errors(name, model, op, method, seconds, held[:, 2]))
            figures[name] |= fit(gpu, shape, *rows.T)
    return records, figures


def fit_decode(gpu: Gpu, shape: LayerShape, requests, contexts, seconds) -> dict[str, float]:
    """Fit the three figures of ``gpu_attention_s``."""
    kv_bytes = requests * contexts * shape.kv_elements * ITEMSIZE
    fixed_s, head_s, byte_s = fit_terms([np.ones_like(requests), requests * shape.num_kv_heads, kv_bytes], seconds)
    return {
        "decode_attention_fixed_us": fixed_s * 1e6,
        "decode_attention_request_head_ns": head_s * 1e9,
        "decode_attention_fraction": 1 / byte_s / (gpu["memory_bandwidth_gb_s"] * 1e9),
    }


def fit_prefill(gpu: Gpu, shape: LayerShape, new_tokens, contexts, seconds) -> dict[str, float]:
    """Fit the two figures of ``prefill_attention_s``."""
    flops = 4 * shape.num_heads * shape.head_dim * new_tokens * (contexts + new_tokens)
    fixed_s, flop_s = fit_terms([np.ones_like(new_tokens), flops], seconds)
    return {
        "prefill_attention_fixed_us": fixed_s * 1e6,
        "prefill_attention_of_gemm": 1 / flop_s / (gpu["tensor_tflops"] * 1e12) / gpu["gemm_fraction"],
    }


def gpu_attention(gpu: Gpu, shape: LayerShape, requests, contexts) -> list[float]:
    return [gpu_attention_s(gpu, shape, ITEMSIZE, n, c) for n, c in zip(requests, contexts, strict=True)]


def prefill_attention(gpu: Gpu, shape: LayerShape, new_tokens, contexts) -> list[float]:
    return [prefill_attention_s(gpu, shape, n, c) for n, c in zip(new_tokens, contexts, strict=True)]


def with_figures(gpu: Gpu, values: Mapping[str, float]) -> Gpu:
    """The GPU with other values for some figures."""
    changed = {name: replace(gpu.figures[name], value=float(value)) for name, value in values.items()}
    return replace(gpu, figures={**gpu.figures, **changed})


def _errors(gpu: str, model: str, op: str, method: str, predicted, measured: np.ndarray) -> FlatRecord:
    """Absolute relative errors of predictions for measured rows that were not used in the fit."""
    errors = np.abs(np.array(list(predicted)) / measured - 1)
    middle, p90 = map(float, np.quantile(errors, (0.5, 0.9)))
    row = {"gpu": gpu, "model": model, "op": op, "method": method, "num_rows": len(errors)}
    return row | {"median_error": middle, "p90_error": p90}


# -- writing ----------------------------------------------------------------------------------------------------------


def write_curves(tables: Sequence[LayerTable], folder: Path) -> None:
    """Write each table's compact curves, fitted to all rows."""
    for table in tables:
        layer = table.fit(np.ones(len(table.tokens), bool))
        head = {
            "gpu": table.gpu,
            "model": table.model,
            "shape": asdict(table.shape),
            "status": "measured",
            "origin": f"{table.origin}; fp16, medians of 20 runs, kernel time only",
            "unit": "ms per layer over tokens",
        }
        text = "# Written by `python -m evaluation.calibrate --write-curves`.\n"
        text += yaml.safe_dump(head, sort_keys=False, width=120)
        for name, curve in (("gemm", layer.gemm), ("elementwise", layer.elementwise)):
            text += f"{name}:\n{_points(curve)}"
        write_atomically(folder / f"{table.gpu}_{SHORT_NAMES[table.model]}.yaml", text)


def _points(curve: Curve) -> str:
    return "".join(f"  - [{n:.0f}, {s * 1e3:.4g}]\n" for n, s in zip(curve.sizes, curve.seconds, strict=True))
