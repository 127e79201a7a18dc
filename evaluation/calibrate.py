"""Checks the calibrated hardware files against measured tables: fits two thirds of the rows, predicts the rest.

`python -m evaluation.calibrate --tables FOLDER` prints the errors and the fitted figures. With `--write-curves` it also
writes the compact curves of `configs/hardware/measured/`, fitted to all rows. The tables are published
(evaluation/calibration/tables.py); docs/simulator.md gives their origin and their file names here.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

if __name__ == "__main__":
    if not __package__:  # run as a file
        import here
    else:  # documents run this one by its module's name
        from evaluation import here

from typing import Annotated

import numpy as np
import tyro
import yaml

from apex.cli.parser import parse_options
from apex.perf.model import Curve
from apex.simulator.hardware.files import HARDWARE_DIR, Gpu, LayerShape, load_gpu
from apex.simulator.prediction.calibrated_profile import gpu_attention_s, linear_curve, prefill_attention_s
from apex.source_tree import IS_SOURCE_TREE
from evaluation.calibration.tables import (
    ATTENTION_TABLES,
    GEMM_POINTS,
    GEMMS,
    SHORT_NAMES,
    LayerTable,
    compact_curve,
    fit_terms,
    read_layer_tables,
    read_table,
)
from evaluation.results.folder import FlatRecord, ResultFolder, markdown_table
from evaluation.results.paths import RESULTS_DIR
from swiftllm.files import write_atomically

ITEMSIZE = 2
COLUMNS = (
    ("gpu", "GPU", "{}"), ("model", "model", "{}"), ("op", "operation", "{}"), ("method", "predicted from", "{}"),
    ("num_rows", "rows", "{}"), ("median_error", "median error", "{:.1%}"), ("p90_error", "p90", "{:.1%}"),
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Report how well the calibrated hardware files predict measured operator times."""

    tables: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    """Folder of the measured tables, mlp_<gpu>_<model>_tp1.csv and attention_*.csv. docs/simulator.md names the
    public files from which they are made, and how."""
    results_dir: Path = RESULTS_DIR
    """Results go to calibration/<run>/ in this folder."""
    write_curves: bool = False
    """Also write the compact curves to configs/hardware/measured, fitted to all rows."""


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


def main(options: Options) -> int:
    """Print and save the errors. Returns the exit status: 1 when a table is missing, 2 for options that do not fit."""
    if options.write_curves and not IS_SOURCE_TREE:
        print("--write-curves writes into configs/ of a source tree, and this is an installed package", file=sys.stderr)
        return 2
    try:
        tables = read_layer_tables(options.tables)
        if options.write_curves:
            write_curves(tables, HARDWARE_DIR / "measured")
        attention, figures = attention_errors(options.tables)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    records = [record for table in tables for record in layer_errors(table)] + attention + transfer_errors(tables)
    read = [*sorted(options.tables.glob("*.csv")), *sorted(HARDWARE_DIR.rglob("*.yaml"))]
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in read}
    folder = ResultFolder("calibration", {"files": hashes}, options.results_dir)
    folder.record_invocation()
    text = markdown_table(records, COLUMNS)
    folder.save_summary(records, text)
    print(text)
    for name, values in figures.items():
        print(f"{name}, fitted to all rows: " + ", ".join(f"{key} {value:.3g}" for key, value in values.items()))
    print(f"written to {folder.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(parse_options(Options, prog="python -m evaluation.calibrate")))
