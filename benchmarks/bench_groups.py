"""Measures CPU attention in groups of 8 query heads beside groups of 4: the same bytes of K and V, on one thread.

Both alternate within a round, kernel by kernel. Figures are medians over rounds of the time that the thread had its
core, which other work on the machine changes least.

python benchmarks/bench_groups.py [--help]
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

if __name__ == "__main__" and not __package__:  # run as a file
    import here

import torch
from rich.console import Console
from rich.table import Table

from apex.cli.options import parse_options
from benchmarks.bench_gpu_batch import timed
from benchmarks.pacpu_cases import BF16_ISAS, Case, Memory, Shape, kernel_contenders
from swiftllm.machine import last_level_cache_bytes
from swiftllm.runtime.cpu_tuning import read_limit, read_limit_bytes, use_fastest_attention

CONTEXT = 1024
MOST_CACHE_BYTES = 1 << 30


@dataclass(frozen=True)
class Options:
    """Measure CPU attention in groups of 8 query heads beside groups of 4."""

    rounds: int = 15
    """Number of rounds, over which medians are taken."""
    dtype: Literal["float16", "bfloat16"] = "float16"
    """Data type of the KV cache."""


def main(options: Options) -> None:
    """Measure and print the table."""
    cases = {4: Case("GQA", options.dtype, Shape(8, CONTEXT), 1), 8: Case("GQA8", options.dtype, Shape(16, CONTEXT), 1)}
    assert len({case.num_bytes for case in cases.values()}) == 1
    memory = Memory(min(2 * last_level_cache_bytes(), MOST_CACHE_BYTES))
    num_layers = memory.num_bytes // cases[4].bytes_held
    contenders = [one for one in kernel_contenders() if options.dtype == "bfloat16" or one.isa not in BF16_ISAS]
    rates: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for contender in contenders:
        with contender.selected():
            use_fastest_attention()
            attend = {group: contender.prepare(case, memory, num_layers) for group, case in cases.items()}
            for number in range(options.rounds + 1):  # the first one warms up
                for group, function in attend.items():
                    calls = range(3 * number, 3 * number + 3)
                    seconds = timed(lambda function=function, calls=calls: [function(i % num_layers) for i in calls])
                    rates[contender.label][group].append(3 * cases[group].num_bytes / seconds / 1e9)
    table = Table("kernel", "groups of 4, GB/s", "groups of 8, GB/s", "ratio", "quartiles")
    for label, by_group in rates.items():
        ratios = [eight / four for four, eight in zip(by_group[4][1:], by_group[8][1:], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        medians = (f"{statistics.median(by_group[group][1:]):.1f}" for group in cases)
        table.add_row(label, *medians, f"{statistics.median(ratios):.2f}", f"{low:.2f} to {high:.2f}")
    mib, read_rate = cases[4].num_bytes >> 20, read_limit(1, memory.bits.view(torch.uint8)[: read_limit_bytes()])
    print(f"{options.dtype}, 32 query heads, {mib} MiB of K and V a call; one core reads {read_rate / 1e9:.1f} GB/s")
    Console().print(table)


if __name__ == "__main__":
    main(parse_options(Options, prog="benchmarks/bench_groups.py"))
