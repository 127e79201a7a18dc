"""bench_pacpu.py --shared: batches whose contexts begin with the same blocks, read by each row and read once.

Both calls take turns in every round, over the caches of several layers. What is reported are medians over rounds. Where
engines do not share blocks on this machine, the row shows what sharing would do.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence

import torch
from rich.console import Console
from rich.table import Table

import pacpu
from benchmarks.pacpu_cases import HEADS, Case, Memory, Shape, prepare_pacpu
from evaluation.results.folder import FlatRecord
from swiftllm.runtime.cpu_tuning import read_limit, read_limit_bytes

OWN_TOKENS = 100
SHAPES = [Shape(rows, shared + OWN_TOKENS, shared=shared) for rows in (8, 32, 64) for shared in (1000, 4000)]
QUICK_SHAPES = [Shape(8, 1000 + OWN_TOKENS, shared=1000)]
READ_EACH = 1.0
MOST_COST = 7 / 8  # a larger one shares no blocks
MAX_LAYERS = 16


class SharedPoint:
    """One case: seconds of its calls, with and without sharing, and bytes per second of reads, by round."""

    def __init__(self, case: Case, memory: Memory) -> None:
        self.case, self.memory = case, memory
        self.kind = case.dtype, case.heads
        self.in_use = pacpu.shared_row_cost(*self.kind)
        self.costs = READ_EACH, min(self.in_use, MOST_COST)
        self.num_layers = max(1, min(MAX_LAYERS, memory.num_bytes // case.bytes_held))
        self.seconds: dict[float, list[float]] = {cost: [] for cost in self.costs}
        self.read_bytes_per_s: list[float] = []

    def run_round(self) -> None:
        number = len(self.read_bytes_per_s)
        # No name: the instruction set in use, whatever the type.
        attend = prepare_pacpu("native", "", self.case, self.memory, self.num_layers)
        memory = self.memory.bits.view(torch.uint8)[: read_limit_bytes()]
        self.read_bytes_per_s.append(read_limit(self.case.threads, memory, passes=1))
        try:
            for turn, cost in enumerate(self.costs if number % 2 else self.costs[::-1]):  # each comes first in turn
                pacpu.set_shared_row_cost(*self.kind, cost)
                start_s = time.perf_counter()
                attend((2 * number + turn) % self.num_layers)
                self.seconds[cost].append(time.perf_counter() - start_s)
        finally:
            pacpu.set_shared_row_cost(*self.kind, self.in_use)

    def row(self) -> FlatRecord:
        case = self.case
        num_heads, num_kv_heads = HEADS[case.heads]
        each, once = (self.seconds[cost] for cost in self.costs)
        reads = zip(once, self.read_bytes_per_s, strict=True)
        return {
            "isa": pacpu.isa(),
            "dtype": case.dtype,
            "heads": num_heads,
            "kv_heads": num_kv_heads,
            "sharers": case.shape.batch,
            "shared_tokens": case.shape.shared,
            "own_tokens": case.shape.context - case.shape.shared,
            "threads": case.threads,
            "read_each_ms": statistics.median(each) * 1e3,
            "read_once_ms": statistics.median(once) * 1e3,
            "speedup": statistics.median(slow / fast for slow, fast in zip(each, once, strict=True)),
            "fraction_of_read": statistics.median(case.num_bytes / seconds / read for seconds, read in reads),
            "shared_row_cost": self.in_use,
            "in_use": self.in_use <= MOST_COST,
            "rounds": len(once),
            "backend": "measured: CPU attention speed",
        }


def print_rows(rows: Sequence[FlatRecord]) -> None:
    table = Table(
        box=None, pad_edge=False, title="contexts that share blocks: medians over rounds", title_justify="left"
    )
    for name in (
        "heads",
        "dtype",
        "threads",
        "sharers",
        "tokens",
        "each, ms",
        "once, ms",
        "speedup",
        "of read",
        "in use",
    ):
        table.add_column(name, justify="left" if name in ("heads", "dtype", "in use") else "right")
    for cells in _cells(rows):
        table.add_row(*cells)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def _cells(rows: Sequence[FlatRecord]) -> Iterator[tuple[str, ...]]:
    for row in rows:
        yield (
            f"{row['heads']}/{row['kv_heads']}", row["dtype"], str(row["threads"]), str(row["sharers"]),
            f"{row['shared_tokens']} + {row['own_tokens']}", f"{row['read_each_ms']:.2f}", f"{row['read_once_ms']:.2f}",
            f"{row['speedup']:.2f}", f"{row['fraction_of_read']:.0%}", "yes" if row["in_use"] else "no",
        )  # fmt: skip
