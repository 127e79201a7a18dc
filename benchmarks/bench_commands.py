"""Measures how long a command of the driver takes to a rank that waits for it, in microseconds.

python benchmarks/bench_commands.py [--help]
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from apex.cli.options import parse_options
from evaluation.results.folder import ResultFolder, markdown_table
from evaluation.results.paths import RESULTS_DIR
from swiftllm.parallel.communication import Pipe
from swiftllm.parallel.team import SpawnedRanks

COMMAND = ("run_stage", 17, [3, 5, 8])  # a GPU batch with two joined CPU batches
COLUMNS = (
    ("pause_us", "pause before a command, us", "{:.0f}"),
    ("p50_us", "p50, us", "{:.1f}"),
    ("p99_us", "p99, us", "{:.1f}"),
    ("send_p50_us", "the driver's part, p50, us", "{:.1f}"),
)


@dataclass(frozen=True)
class Options:
    """Measure commands from this process to a rank's, which sleeps until one arrives; takes a few seconds."""

    commands: int = 2000
    """Commands of each row."""
    pauses_us: tuple[int, ...] = (100, 300, 1000, 3000)
    """Microseconds of the driver's own work between two commands: stages take a hundred to some thousand."""
    results_dir: Path = RESULTS_DIR
    """Results go to bench_commands/<run>/ in this folder."""


def answer_with_delays(pipe: Pipe) -> None:
    """The rank's part: answer each row with the seconds that its commands took."""
    while True:
        taken = []
        while (message := pipe.receive())[0] == "run_stage":
            taken.append(time.monotonic() - message[-1])
        if message[0] == "finish":
            return
        pipe.send("taken", taken)


def measure(pipe: Pipe, commands: int, pause_us: int) -> dict[str, Any]:
    """Seconds from before the sending to after the receiving: the clock is the same in all processes of a machine."""
    sending = []
    for _ in range(commands):
        end_s = time.monotonic() + pause_us * 1e-6
        while time.monotonic() < end_s:
            pass
        start_s = time.monotonic()
        pipe.send(*COMMAND, start_s)
        sending.append(time.monotonic() - start_s)
    pipe.send("report")
    _, taken = pipe.receive()
    percentiles = statistics.quantiles(taken, n=100)
    return {
        "system": "command",
        "backend": "measured: one way, to a process that sleeps",
        "model": "none",
        "pause_us": pause_us,
        "p50_us": percentiles[49] * 1e6,
        "p99_us": percentiles[98] * 1e6,
        "send_p50_us": statistics.median(sending) * 1e6,
    }


def main(options: Options) -> None:
    """Measure, print, save."""
    folder = ResultFolder("bench_commands", {"benchmark": "commands", "date": time.ctime()}, options.results_dir)
    folder.record_invocation()
    process, pipe = SpawnedRanks("benchmarks.bench_commands:answer_with_delays").start(1, 1)
    measure(pipe, 200, 100)  # warms up
    records = [measure(pipe, options.commands, pause_us) for pause_us in options.pauses_us]
    pipe.send("finish")
    process.wait()
    table = markdown_table(records, COLUMNS)
    print(table)
    folder.save_summary(records, table)
    print(f"summary and provenance: {folder.path}")


if __name__ == "__main__":
    main(parse_options(Options, prog="benchmarks/bench_commands.py"))
