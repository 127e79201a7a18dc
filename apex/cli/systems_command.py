"""What `apex bench` and `apex simulate` share: the same requests, of one or two classes, through several systems.

The requests come once or, at several rates, several times: each such run is a load.
"""

from __future__ import annotations

import functools
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apex.cli.options import BestEffortFlags, ConfigFile, TimelineFlags, check_output_file
from apex.cli.output import InputError, input_errors, number, ratio, stdout_console, strategy_mix, table
from apex.cli.traffic import RATE_WORDS, TrafficFlags, service_table, write_service
from apex.progress import progress_bar
from apex.replay.loop import replay_requests
from apex.replay.metrics import Targets, compute_metrics, predicted_over_actual
from apex.replay.records import Replay, ReplayRequest
from apex.strategy import StrategyConfig
from swiftllm.config import check_at_least
from swiftllm.core.request import ServiceClass
from swiftllm.files import expand, save_result

if TYPE_CHECKING:
    from rich.table import Table

    from apex.workloads.requests import Lengths
    from swiftllm.engine.engine import Engine


class SystemsCommand(ConfigFile):
    """A command that compares systems. It declares these options, with defaults and help of its own."""

    model: str
    system: tuple[str, ...]
    num_requests: int
    input_len: int
    output_len: int
    output: Path | None
    traffic: TrafficFlags
    best_effort: BestEffortFlags
    timeline: TimelineFlags

    def check_flags(self) -> None:
        """Check what both commands have, before anything runs."""
        with input_errors(of_engine=False):
            check_at_least(1, self, "num_requests", "input_len", "output_len")
            if not self.system:
                raise ValueError("--system needs the name of at least one system")
            self.best_effort.check_flags()
            self.timeline.check_flags(self.system)
            self.traffic.check_flags()
            if self.timeline.trace_timeline is not None and self.num_loads > 1:
                raise ValueError("--trace-timeline records one run of a system: give one --request-rate")
        check_output_file("--output", self.output)

    # -- the requests -----------------------------------------------------------------------------------------------

    @property
    def best_effort_sizes(self) -> tuple[int, int]:
        """Prompt and output tokens of a best-effort request."""
        flags = self.best_effort
        return flags.best_effort_input_len or self.input_len, flags.best_effort_output_len or self.output_len

    @property
    def best_effort_words(self) -> str:
        """What to add to the description of the requests; empty without best-effort ones."""
        prompt, output = self.best_effort_sizes
        count = self.best_effort.best_effort_requests
        return f", {count} best-effort ones of {prompt} in / {output} out" if count else ""

    @property
    def num_loads(self) -> int:
        return max(1, len(self.traffic.request_rate) + self.traffic.trace_arrivals)

    @functools.cached_property
    def loads(self) -> dict[str, Lengths]:
        """Lengths and arrivals of each load, all but the best-effort requests, by the words for it.

        Raises:
            ValueError: there is no such workload.
        """
        folder = expand(self.model)
        return self.traffic.loads(
            self.num_requests,
            self.input_len,
            self.output_len,
            self.seed_of_requests,
            folder if folder.is_dir() else None,
        )

    @property
    def seed_of_requests(self) -> int:
        """Of lengths and arrivals."""
        raise NotImplementedError

    @property
    def first_load(self) -> Lengths:
        return next(iter(self.loads.values()))

    @property
    def size_words(self) -> str:
        """How many requests of which size."""
        sizes = f"{self.input_len} in / {self.output_len} out" if self.traffic.workload is None else self.mean_words
        return f"{self.num_requests} requests of {sizes}"

    @property
    def request_words(self) -> str:
        """How many requests of which size, and when they come."""
        rates = ", ".join(f"{rate:g}" for rate in self.traffic.request_rate)
        others = [load for load in self.loads if not load.endswith(RATE_WORDS)]
        return ", ".join([self.size_words, *([rates + RATE_WORDS] if rates else []), *others])

    @property
    def workload_words(self) -> str:
        sizes = f"{self.input_len} in / {self.output_len} out" if self.traffic.workload is None else self.mean_words
        return f"{self.num_requests} x {sizes}{self.best_effort_words}"

    @property
    def mean_words(self) -> str:
        lengths = self.first_load
        return f"{lengths.title}, {lengths.mean_input_tokens:.0f} in / {lengths.mean_output_tokens:.0f} out on average"

    def sizes(self, lengths: Lengths) -> list[tuple[int, int]]:
        """Prompt and output tokens of all requests of a load, the best-effort ones last."""
        best_effort = [self.best_effort_sizes] * self.best_effort.best_effort_requests
        return [(row.input_tokens, row.output_tokens) for row in lengths.rows] + best_effort

    def prompts(
        self, lengths: Lengths, texts: Callable[[Sequence[int]], Sequence[tuple[int, ...]]]
    ) -> list[tuple[int, ...]]:
        """The prompts of all requests of a load, from texts that begin differently, of these lengths."""
        from apex.workloads.files import TraceRow
        from apex.workloads.requests import prompts_of

        best_effort = [TraceRow(*self.best_effort_sizes)] * self.best_effort.best_effort_requests
        return prompts_of([*lengths.rows, *best_effort], texts)

    def requests(self, lengths: Lengths, prompts: Sequence[tuple[int, ...]]) -> list[ReplayRequest]:
        """The requests of a load with these prompts. Best-effort ones are there from the start."""
        own, rest = prompts[: self.num_requests], prompts[self.num_requests :]
        output_len, best_effort = self.best_effort_sizes[1], ServiceClass.BEST_EFFORT
        return [
            *(
                ReplayRequest(
                    str(i), row.start_s, prompt, row.output_tokens, after=None if row.after is None else str(row.after)
                )
                for i, (row, prompt) in enumerate(zip(lengths.rows, own, strict=True))
            ),
            *(ReplayRequest(f"best-effort-{i}", 0.0, p, output_len, best_effort) for i, p in enumerate(rest)),
        ]

    def load_values(self, load: str) -> dict[str, Any]:
        """What a row says of its requests."""
        lengths = self.loads[load]
        return {
            "workload": self.workload_words,
            "load": load,
            "request_rate": lengths.spec.request_rate,
            **(
                {}
                if self.traffic.workload is None
                else {"trace_origin": lengths.origin.kind, "trace_note": lengths.origin.note}
            ),
        }

    # -- a run, and its figures -------------------------------------------------------------------------------------

    def replay(
        self,
        engine: Engine,
        requests: Sequence[ReplayRequest],
        setting: str,
        load: str,
        simulated: bool = False,
        **options: Any,
    ) -> Replay:
        """Run the requests with a progress bar, and with a timeline if asked for.

        ``setting`` describes what runs where. ``options``: those of :func:`apex.replay.loop.replay_requests`.
        """
        total = sum(request.output_len for request in requests)
        start_tokens, start_s = engine.stats().output_tokens, engine.now()
        system = engine.describe()["system"]
        title = system if self.num_loads == 1 else f"{system}, {load}"

        def fraction_done() -> float:
            return (engine.stats().output_tokens - start_tokens) / total

        with (
            self.timeline.traced(engine, setting, fraction_done, simulated=simulated),
            progress_bar(f"simulating {title}" if simulated else title) as report,
        ):

            def show(tokens: int) -> None:
                rate = "" if simulated else f", {tokens / (engine.now() - start_s):.0f}/s"
                report(tokens / total, f"{tokens}/{total} tokens{rate}")

            limit_s = math.inf if self.best_effort.duration_s is None else self.best_effort.duration_s
            return replay_requests(engine, requests, show, limit_s=limit_s, **options)

    def figures(self, replay: Replay, strategy: StrategyConfig) -> dict[str, Any]:
        """Flat figures of a run, against the targets of ``strategy``: every metric, and what the engine counted."""
        stats, targets = replay.stats, Targets(strategy.ttft_slo_s, strategy.tpot_slo_s)
        return {
            **compute_metrics(replay.records, replay.wall_s, stats, targets, self.best_effort.duration_s),
            "preemptions": stats["preemptions"],
            "predicted_over_actual": predicted_over_actual(stats),
            "strategy_mix": strategy_mix(stats["strategy_iterations"]),
        }

    def report(self, records: Sequence[Mapping[str, Any]], how: str, setting: str, *remarks: str) -> None:
        """Print loads and systems side by side and what is to be said of them, and write the figures if asked for.

        Args:
            how: SIMULATED or MEASURED.
            setting: what ran where.
        """
        if self.traffic.is_service and not self.best_effort.best_effort_requests:
            shown = service_table(records, how, goodput=self.traffic.has_targets)
            stdout_console().print(shown)
            targets = f"a first token within {records[0]['ttft_target_s']:g} s and {records[0]['tpot_target_s']:g} s"
            remarks = (f"goodput: requests/s with {targets} per further token" * self.traffic.has_targets, *remarks)
        else:
            for load in self.loads:
                if self.num_loads > 1:
                    print(f"{load}:")
                stdout_console().print(figures_table([record for record in records if record["load"] == load]))
        for line in filter(None, (*map(self._unfinished_line, records), *remarks)):
            print(line)
        if self.output is not None and not save_result(self.output, json.dumps(records, indent=1) + "\n"):
            raise InputError(f"--output {self.output} was not written")
        if self.traffic.plot is not None:
            picture, rows = write_service(records, self.traffic.plot, setting, how)
            print(f"plot: {picture}, rows: {rows}")

    def _unfinished_line(self, record: Mapping[str, Any]) -> str:
        return unfinished_line(record, f", {record['load']}" if self.num_loads > 1 else "")


class Remaining:
    """Says after each of several runs, on stderr, about how long the rest takes by the tokens of the runs."""

    def __init__(self, title: str, tokens: Sequence[int]) -> None:
        """``tokens``: output tokens of each run, in their order."""
        self._title, self._tokens, self._start_s, self._ended = title, tokens, time.monotonic(), 0

    def ended(self) -> None:
        """A run has ended."""
        self._ended += 1
        done, left = sum(self._tokens[: self._ended]), sum(self._tokens[self._ended :])
        if left:
            left_s = (time.monotonic() - self._start_s) * left / done
            runs = f"{self._ended} of {len(self._tokens)} runs"
            print(f"{self._title}: {runs} have ended, about {left_s:.0f} s to go", file=sys.stderr, flush=True)


def unfinished_line(record: Mapping[str, Any], load: str = "") -> str:
    """How many requests are not in the first figures; empty if none. ``load``: words for the load."""
    if not record["failed"]:
        return ""
    total = record["completed"] + record["failed"]
    what = "requests were refused or cut short: tok/s and latencies leave them out"
    return f"{record['system']}{load}: {record['failed']} of {total} {what}"


def figures_table(records: Sequence[Mapping[str, Any]]) -> Table:
    """The systems side by side; ratios are to the first. With two classes, also attainment and best-effort tokens."""
    first = records[0]["output_tokens_per_s"]
    of_classes = (("in SLO", "slo_attainment", ".1%"), ("BE tok/s", "best_effort_tokens_per_s", ".1f"))
    has_classes = any(record.get("service_class") == "both" for record in records)
    columns = (
        ("tok/s", "output_tokens_per_s", ".1f"),
        (f"/{records[0]['system']}", "ratio", ".2f"),
        ("s/token", "per_token_latency_s_mean", ".3f"),
        *(of_classes if has_classes else ()),
        ("GPU batch", "gpu_batch_busy_fraction", ".0%"),
        ("CPU", "cpu_busy_fraction", ".0%"),
        ("preempted", "preemptions", "d"),
        ("pred/actual", "predicted_over_actual", ".2f"),
    )
    rows = []
    for record in records:
        cells = {**record, "ratio": ratio(record["output_tokens_per_s"], first)}
        rows.append((record["system"], *(number(cells[key], form) for _, key, form in columns), record["strategy_mix"]))
    titles = ("system", *(title for title, _, _ in columns), "strategy mix")
    return table(titles, rows, left=("system", "strategy mix"))
