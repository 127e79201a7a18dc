"""Measures CPU attention over the batch size: llamafile's kernel and the native one beside `ispc`, on one thread.

python benchmarks/bench_batches.py [--help]

APEX's paper (section 4.1) says that its kernel is a little slower than NEO's at small batches, and up to twice as fast
as the batch grows. `llamafile` stands for the first and `ispc` for the second. A round runs every batch with every
kernel, in changing order; ratios are taken within a round. Rates are by the thread's time on its core, which other
work on the machine hardly changes. Figures are medians over rounds. Calls rotate over the caches of several layers,
which together exceed the last-level cache.
"""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from rich.console import Console

import pacpu
from apex.cli.options import parse_options
from benchmarks.bench_gpu_batch import timed
from benchmarks.bench_pacpu import MIN_TIMED_BYTES, fitting
from benchmarks.pacpu_cases import (
    BF16_ISAS,
    HEADS,
    Case,
    Contender,
    Memory,
    Shape,
    make_cases,
    prepare_pacpu,
    usable_isas,
)
from evaluation.results.claims import load_claims, print_claims
from evaluation.results.folder import FlatRecord, ResultFolder
from evaluation.results.paths import RESULTS_DIR
from evaluation.results.tables import rows_table
from swiftllm.machine import cpu_model
from swiftllm.runtime.cpu_tuning import use_fastest_attention

NAME = "pacpu-batches"
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXT = 1000
COLUMNS = (
    ("heads", "workload", "s"), ("kernel", "kernel", "s"), ("GB/s", "attention_gb_s", ".1f"),
    ("/ ispc", "ratio_to_ispc", ".2f"), ("quartiles", "quartiles", "s"),
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Measure the CPU attention kernels over the batch size, on one thread in float16."""

    rounds: int = 15
    """Number of rounds, over which medians are taken."""
    results_dir: Path = RESULTS_DIR
    """Results go to pacpu-batches/<run>/ in this folder."""


class Point:
    """A case, its kernels, and their rates in each round."""

    def __init__(self, case: Case, memory: Memory, isa: str, kernels: Sequence[str]) -> None:
        self.case, self.isa = case, isa
        self.num_layers = memory.num_bytes // case.bytes_held
        self.calls = -(-MIN_TIMED_BYTES // case.num_bytes)
        self.next_layer = 0
        self.attend: dict[str, Callable[[int], Any]] = {
            kernel: prepare_pacpu(kernel, isa, case, memory, self.num_layers) for kernel in kernels
        }
        self.gb_s: dict[str, list[float]] = defaultdict(list)

    def run_round(self, number: int) -> None:
        kernels = list(self.attend)
        first = number % len(kernels)
        for kernel in kernels[first:] + kernels[:first]:
            seconds = timed(lambda attend=self.attend[kernel]: self._calls(attend))
            self.gb_s[kernel].append(self.calls * self.case.num_bytes / seconds / 1e9)

    def _calls(self, attend: Callable[[int], Any]) -> None:
        for _ in range(self.calls):
            attend(self.next_layer)
            self.next_layer = (self.next_layer + 1) % self.num_layers

    def rows(self) -> list[FlatRecord]:
        num_heads, num_kv_heads = HEADS[self.case.heads]
        batch, rows = self.case.shape.batch, []
        for kernel, gb_s in self.gb_s.items():
            ratios = [one / ispc for one, ispc in zip(gb_s, self.gb_s.get("ispc", ()), strict=False)]
            low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [None] * 3
            rows.append(
                {
                    "system": kernel,
                    "backend": "measured: CPU attention speed",
                    "kernel": kernel,
                    "cpu": cpu_model(),
                    "workload": f"{num_heads} heads on {num_kv_heads}, batch {batch}",
                    "isa": self.isa,
                    "dtype": self.case.dtype,
                    "heads": num_heads,
                    "kv_heads": num_kv_heads,
                    "batch": batch,
                    "context": self.case.shape.context,
                    "threads": self.case.threads,
                    "attention_gb_s": statistics.median(gb_s),
                    "ratio_to_ispc": middle,
                    "ratio_to_ispc_low": low,
                    "ratio_to_ispc_high": high,
                    "rounds": len(gb_s),
                }
            )
        return rows


def main(options: Options) -> None:
    isa = next(isa for isa in usable_isas() if isa not in BF16_ISAS)  # of float16
    kernels = pacpu.kernels("float16")
    cases, memory = fitting(make_cases([Shape(batch, CONTEXT) for batch in BATCHES], (1,), ("float16",)))
    configuration = {
        "experiment": NAME,
        "cases": [str(case) for case in cases],
        "kernels": {kernel: isa for kernel in kernels},
        "unavailable": pacpu.unavailable(),
        "rounds": options.rounds,
    }
    folder = ResultFolder(NAME, configuration, options.results_dir)
    folder.record_invocation()
    with Contender("", isa, lambda *_: None).selected():
        use_fastest_attention()
        points = [Point(case, memory, isa, kernels) for case in cases]
        for number in range(options.rounds):
            for point in points:
                point.run_round(number)
    rows = [row for point in points for row in point.rows()]
    folder.save_summary(rows)
    console = Console(width=None if os.isatty(1) else 120)
    load = f"load {os.getloadavg()[0]:.1f}"
    console.print(f"MEASURED: {cpu_model()}, one thread, {isa}, float16, contexts of {CONTEXT}; {load}")
    console.print(rows_table([{**row, "quartiles": quartiles(row)} for row in rows], COLUMNS))
    print_claims(load_claims(NAME), rows, console)
    console.print(f"summary and provenance: {folder.path}", highlight=False, soft_wrap=True)


def quartiles(row: FlatRecord) -> str:
    return "" if row["ratio_to_ispc"] is None else "{ratio_to_ispc_low:.2f} to {ratio_to_ispc_high:.2f}".format(**row)


if __name__ == "__main__":
    main(parse_options(Options, prog="benchmarks/bench_batches.py"))
