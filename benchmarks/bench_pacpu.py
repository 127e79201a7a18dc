"""Compares every CPU attention kernel with the speed of memory.

python benchmarks/bench_pacpu.py [--help]

A round runs every case with every kernel, with every instruction set of this CPU, and streaming reads of the same
memory, whose best is the read limit. Ratios are taken within a round, so that drift and other work affect them least.
Figures are medians over rounds. Calls rotate over the caches of several layers, which together exceed the last-level
cache. The native kernel runs with every way of prefetching; its row is that of the way that engines use here. The ways
are compared by the time of the threads on their cores, which other work on the machine hardly changes.
"""

from __future__ import annotations

import datetime
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__" and not __package__:  # run as a file
    import here
# Otherwise a peer's OpenMP threads keep spinning after its calls and slow down the next contender.
os.environ.setdefault("OMP_WAIT_SCHEDULER", "passive")

import torch

import pacpu
from apex.cli.parser import parse_options
from benchmarks import pacpu_shared
from benchmarks.pacpu_cases import (
    ALL_WAYS,
    BF16_ISAS,
    HEADS,
    Case,
    Contender,
    Memory,
    Shape,
    kernel_contenders,
    make_cases,
    peer_contenders,
)
from benchmarks.pacpu_report import (
    Progress,
    draw_kernels,
    markdown_rows,
    print_medians,
    print_prefetches,
    print_ratios,
    verdicts,
)
from evaluation.plots.style import save_figure
from evaluation.results.folder import FlatRecord, ResultFolder
from evaluation.results.paths import RESULTS_DIR
from swiftllm.machine import available_host_bytes, cpu_model, last_level_cache_bytes, usable_cores
from swiftllm.read_limit import read_limit, read_limit_bytes
from swiftllm.runtime.attention_choices import use_fastest_attention

SHAPES = (
    Shape(1, 512), Shape(1, 2048), Shape(8, 1024), Shape(16, 1024, ragged=True), Shape(32, 512), Shape(32, 2048),
    Shape(128, 512), Shape(128, 1024, ragged=True), Shape(128, 2048),
)  # fmt: skip
QUICK_SHAPES = (Shape(1, 2048), Shape(8, 1024), Shape(16, 1024, ragged=True))
MIN_TIMED_BYTES = 64 << 20  # so that a measurement takes milliseconds
MIN_ROTATION_BYTES = 512 << 20
MAX_ROUNDS = 15
# Limits of the relative distance between two kernels' outputs. Outputs are rounded to the type; the native kernel's
# bfloat16 products also round the weights.
TOLERANCE = {"float16": 0.001, "bfloat16": 0.01, "int8": 0.001}


@dataclass(frozen=True)
class Options:
    """Compare the CPU attention kernels with each other and with streaming reads."""

    quick: bool = False
    """Run a few cases only, in about a minute."""
    seconds: float | None = None
    """Time limit in seconds; at least one round runs. By default 220, with --quick 50."""
    threads: tuple[int, ...] = field(default_factory=lambda: tuple(sorted({1, usable_cores()})))
    """Numbers of threads to measure."""
    kv_dtypes: tuple[str, ...] = ("float16", "bfloat16", "int8")
    """Data types of the KV cache; with int8 queries are float16."""
    shared: bool = False
    """Measure contexts that begin with the same blocks instead: read once, and by each row (native kernel)."""
    results_dir: Path = RESULTS_DIR
    """Results go to pacpu/<run>/, with --shared to pacpu_shared/<run>/ in this folder."""


class Point:
    """One case, its contenders, and the results of each round."""

    def __init__(self, case: Case, memory: Memory, everyone: Sequence[Contender]) -> None:
        self.case = case
        rotation = max(MIN_ROTATION_BYTES, 8 * last_level_cache_bytes(), case.bytes_held)
        held = memory.elements(case.dtype).nbytes
        self.num_layers = min(rotation, held) // case.bytes_held
        self.calls = -(-MIN_TIMED_BYTES // case.num_bytes)
        self.memory = memory
        self.everyone = everyone
        self.next_layer = 0
        self.read_gbps: list[float] = []
        self.gbps: dict[Contender, list[float]] = defaultdict(list)
        self.gbps_by_way: dict[Contender, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def run_round(self) -> None:
        # Prepared in every round, since the tables and queries of all points together would be large.
        attend = self._prepare()
        if not self.read_gbps:
            self._check(attend)
        self.read_gbps.append(self._read())
        for contender, function in attend.items():
            with contender.selected():
                if contender.kernel == "native":
                    self.gbps[contender].append(self._time_ways(self.gbps_by_way[contender], function))
                else:
                    self.gbps[contender].append(self._time_calls(function)[0])

    def _prepare(self) -> dict[Contender, Callable[[int], torch.Tensor]]:
        ready = {}
        for contender in self.everyone:
            with contender.selected():
                ready[contender] = contender.prepare(self.case, self.memory, self.num_layers)
        return {contender: function for contender, function in ready.items() if function is not None}

    def _check(self, attend: Mapping[Contender, Callable[[int], torch.Tensor]]) -> None:
        """Check that all kernels of pacpu agree, so that no wrong result is measured."""
        outputs = {}
        for contender, function in attend.items():
            with contender.selected():
                if contender.kernel in pacpu.kernels():
                    outputs[contender] = function(0).float()
        (first, expected), *others = outputs.items()
        for contender, output in others:
            error = ((output - expected).norm() / expected.norm()).item()
            if not error < TOLERANCE[self.case.dtype]:
                raise SystemExit(f"{contender.label} differs from {first.label} by {error:.2%} at {self.case}")

    def _read(self) -> float:
        memory = self.memory.bits.view(torch.uint8)[: read_limit_bytes()]
        return read_limit(self.case.threads, memory, passes=3) / 1e9

    def _time_ways(self, by_way: dict[str, list[float]], attend: Callable[[int], torch.Tensor]) -> float:
        """GB/s with the way of prefetching in use; ``by_way`` takes those of all ways: of one thread by its time on its
        core, of several by the clock, since one of them may do more than its share."""
        kind = self.case.dtype, self.case.heads
        in_use, gbps = pacpu.prefetch(*kind), 0.0
        ways = pacpu.prefetches(*kind)
        first = len(self.read_gbps) % len(ways)  # each comes first, second and last in turn
        for way in ways[first:] + ways[:first]:
            pacpu.set_prefetch(*kind, way)
            by_clock, by_cores = self._time_calls(attend)
            by_way[way].append(by_cores if self.case.threads == 1 else by_clock)
            gbps = by_clock if way == in_use else gbps
        pacpu.set_prefetch(*kind, in_use)
        return gbps

    def _time_calls(self, attend: Callable[[int], torch.Tensor]) -> tuple[float, float]:
        """GB/s by the clock, and by the time that the threads had their cores."""
        start_s, start_cores_s = time.perf_counter(), time.process_time()
        for _ in range(self.calls):
            attend(self.next_layer)
            self.next_layer = (self.next_layer + 1) % self.num_layers
        num_bytes = self.calls * self.case.num_bytes / 1e9
        cores_s = (time.process_time() - start_cores_s) / self.case.threads
        return num_bytes / (time.perf_counter() - start_s), num_bytes / cores_s

    def rows(self) -> list[FlatRecord]:
        case, rows = self.case, []
        num_heads, num_kv_heads = HEADS[case.heads]
        by_name = {(contender.kernel, contender.isa): gbps for contender, gbps in self.gbps.items()}
        peers = [gbps for (kernel, _), gbps in by_name.items() if kernel == "vLLM"]
        vllm = max(peers, key=statistics.median, default=None)
        for contender, gbps in self.gbps.items():
            ispc = by_name.get(("ispc", "avx512" if contender.isa in BF16_ISAS else contender.isa))
            rows.append(
                {
                    "kernel": contender.kernel,
                    "isa": contender.isa,
                    "dtype": case.dtype,
                    "heads": num_heads,
                    "kv_heads": num_kv_heads,
                    "batch": case.shape.batch,
                    "context": case.shape.context,
                    "ragged": case.shape.ragged,
                    "threads": case.threads,
                    "gbps": statistics.median(gbps),
                    "read_gbps": statistics.median(self.read_gbps),
                    "fraction_of_read": median_ratio(gbps, self.read_gbps),
                    "ratio_to_ispc": ispc and median_ratio(gbps, ispc),
                    "ratio_to_vllm": vllm and median_ratio(gbps, vllm),
                    **self._prefetch_columns(contender),
                    "rounds": len(gbps),
                    "backend": "measured: CPU attention speed",
                }
            )
        return rows

    def _prefetch_columns(self, contender: Contender) -> FlatRecord:
        """The way in use, its part of the fastest way's speed, and GB/s of each, of the cores' time; for another kernel
        None."""
        if contender not in self.gbps_by_way:
            return dict.fromkeys(("prefetch", "of_fastest_prefetch", *(f"{way}_gbps" for way in ALL_WAYS)))
        with contender.selected():
            in_use = pacpu.prefetch(self.case.dtype, self.case.heads)
        medians = {way: statistics.median(gbps) for way, gbps in self.gbps_by_way[contender].items()}
        return {
            "prefetch": in_use,
            "of_fastest_prefetch": medians[in_use] / max(medians.values()),
            **{f"{way}_gbps": medians.get(way) for way in ALL_WAYS},
        }


def median_ratio(values: Sequence[float], references: Sequence[float]) -> float:
    return statistics.median(value / reference for value, reference in zip(values, references, strict=True))


def ratios_to_float16(points: Sequence[Point], rows: Sequence[FlatRecord]) -> None:
    """Give each row of int8 `ratio_to_float16`: tokens/s by those of float16 with the same instruction set in the same
    round, each with its fastest prefetches. None elsewhere."""
    rates = {}
    for point in points:
        for contender, by_way in point.gbps_by_way.items():
            best = max(by_way.values(), key=statistics.median)
            case = point.case
            shape = case.shape.batch, case.shape.context, case.shape.ragged
            key = case.dtype, contender.isa, HEADS[case.heads], *shape, case.threads
            rates[key] = [gbps / case.bytes_per_token for gbps in best]
    for row in rows:
        key = row["isa"], (row["heads"], row["kv_heads"]), row["batch"], row["context"], row["ragged"], row["threads"]
        floats = rates.get(("float16", *key))
        is_int8 = row["dtype"] == "int8" and floats
        row["ratio_to_float16"] = median_ratio(rates["int8", *key], floats) if is_int8 else None


def measure_shared(options: Options) -> None:
    use_fastest_attention()
    shapes = pacpu_shared.QUICK_SHAPES if options.quick else pacpu_shared.SHAPES
    dtypes = [dtype for dtype in options.kv_dtypes if dtype != "int8"]
    cases, memory = fitting(make_cases(shapes, options.threads, dtypes))
    seconds = options.seconds or (50.0 if options.quick else 150.0)
    configuration = {"benchmark": "pacpu, shared blocks", "cases": [str(case) for case in cases], "seconds": seconds}
    folder = ResultFolder("pacpu_shared", configuration | {"date": time.ctime()}, options.results_dir)
    folder.record_invocation()
    points = [pacpu_shared.SharedPoint(case, memory) for case in cases]
    measure(points, seconds)
    rows = [point.row() for point in points]
    folder.save_summary(rows, markdown_rows(rows))
    pacpu_shared.print_rows(rows)
    print(f"all rows and provenance: {folder.path}")


def fitting(cases: Sequence[Case]) -> tuple[list[Case], Memory]:
    """The cases that fit a quarter of the free memory, and the memory for them."""
    room = available_host_bytes() // 4
    kept = [case for case in cases if case.bytes_held <= room]
    left_out = sorted({f"{case.heads} {case.shape}" for case in cases if case not in kept})
    if left_out:
        print(f"skipped, larger than a quarter of the free memory ({room >> 20} MiB): {', '.join(left_out)}")
    rotation = max(MIN_ROTATION_BYTES, 8 * last_level_cache_bytes(), *(case.bytes_held for case in kept))
    return kept, Memory(min(rotation, room))


def measure(points: Sequence[Point | pacpu_shared.SharedPoint], seconds: float) -> None:
    """Run rounds over all points until the next round would exceed the time limit."""
    start_s = time.perf_counter()
    with Progress(len(points), start_s, seconds) as progress:
        for number in range(1, MAX_ROUNDS + 1):
            round_start_s = time.perf_counter()
            for index, point in enumerate(points):
                point.run_round()
                progress.update(number, index + 1)
            now_s = time.perf_counter()
            if now_s + (now_s - round_start_s) > start_s + seconds:
                return


def main(options: Options) -> None:
    if options.shared:
        return measure_shared(options)
    found, absent = peer_contenders()
    everyone = [*kernel_contenders(), *found]
    for contender in everyone:
        with contender.selected():
            use_fastest_attention()
    cases, memory = fitting(make_cases(QUICK_SHAPES if options.quick else SHAPES, options.threads, options.kv_dtypes))
    seconds = options.seconds or (50.0 if options.quick else 220.0)
    configuration = {
        "benchmark": "pacpu",
        "cases": [str(case) for case in cases],
        "contenders": [contender.label for contender in everyone],
        "unavailable": pacpu.unavailable() | absent,
        "seconds": seconds,
        "date": time.ctime(),
    }
    folder = ResultFolder("pacpu", configuration, options.results_dir)
    folder.record_invocation()
    print(f"{len(cases)} cases, {', '.join(contender.label for contender in everyone)}")
    for name, reason in (pacpu.unavailable() | absent).items():
        print(f"without {name}: {reason}")
    points = [Point(case, memory, everyone) for case in cases]
    measure(points, seconds)
    rows = [row for point in points for row in point.rows()]
    ratios_to_float16(points, rows)
    folder.save_summary(rows, markdown_rows(rows))
    made = f"{cpu_model()}, {usable_cores()} cores, {datetime.date.today()}"
    save_figure(draw_kernels(rows, made), folder.path)
    print_medians(rows)
    print_prefetches(rows)
    print_ratios(rows)
    for line in verdicts(rows):
        print(line)
    print(f"all rows, figure and provenance: {folder.path}")


if __name__ == "__main__":
    main(parse_options(Options, description=__doc__))
