"""Checks the calibrated hardware files against measured tables: fits two thirds of the rows, predicts the rest.

`python -m evaluation.calibrate --tables FOLDER` prints the errors and the fitted figures. With `--write-curves` it also
writes the compact curves of `configs/hardware/measured/`, fitted to all rows. The tables are published
(evaluation/validation/calibration.py); docs/simulator.md gives their origin and their file names here.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    if not __package__:  # run as a file
        import here
    else:  # documents run this one by its module's name
        from evaluation import here

from typing import Annotated

import tyro

from apex.cli.options import parse_options
from apex.simulator.hardware_files import HARDWARE_DIR
from apex.source_tree import IS_SOURCE_TREE
from evaluation.results.folder import ResultFolder, markdown_table
from evaluation.results.paths import RESULTS_DIR
from evaluation.validation.calibration import (
    attention_errors,
    layer_errors,
    read_layer_tables,
    transfer_errors,
    write_curves,
)

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
