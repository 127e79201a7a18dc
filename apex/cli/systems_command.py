"""What `apex bench` and `apex simulate` share: the same requests, of one or two classes, through several systems."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apex.cli.options import BestEffortFlags, ConfigFile, TimelineFlags, check_output_file
from apex.cli.output import InputError, input_errors, number, ratio, stdout_console, strategy_mix, table
from apex.progress import progress_bar
from apex.replay.loop import replay_requests
from apex.replay.metrics import Targets, compute_metrics, predicted_over_actual
from apex.replay.records import Replay, ReplayRequest
from apex.strategy import StrategyConfig
from swiftllm.config import check_at_least
from swiftllm.core.request import ServiceClass
from swiftllm.files import save_result

if TYPE_CHECKING:
    from rich.table import Table

    from swiftllm.engine.engine import Engine


class SystemsCommand(ConfigFile):
    """A command that compares systems. It declares these options, with defaults and help of its own."""

    system: tuple[str, ...]
    num_requests: int
    input_len: int
    output_len: int
    output: Path | None
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
    def workload_words(self) -> str:
        return f"{self.num_requests} x {self.input_len} in / {self.output_len} out{self.best_effort_words}"

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Prompt and output tokens of all requests, the best-effort ones last."""
        best_effort = [self.best_effort_sizes] * self.best_effort.best_effort_requests
        return [(self.input_len, self.output_len)] * self.num_requests + best_effort

    def requests(self, prompts: Sequence[tuple[int, ...]], arrivals_s: Sequence[float]) -> list[ReplayRequest]:
        """The requests with these prompts. Best-effort ones are there from the start."""
        own, rest = prompts[: self.num_requests], prompts[self.num_requests :]
        output_len, best_effort = self.best_effort_sizes[1], ServiceClass.BEST_EFFORT
        return [
            *(ReplayRequest(str(i), arrivals_s[i], prompt, self.output_len) for i, prompt in enumerate(own)),
            *(ReplayRequest(f"best-effort-{i}", 0.0, p, output_len, best_effort) for i, p in enumerate(rest)),
        ]

    # -- a run, and its figures -------------------------------------------------------------------------------------

    def replay(
        self, engine: Engine, requests: Sequence[ReplayRequest], setting: str, simulated: bool = False, **options: Any
    ) -> Replay:
        """Run the requests with a progress bar, and with a timeline if asked for.

        ``setting`` describes what runs where. ``options``: those of :func:`apex.replay.loop.replay_requests`.
        """
        total = sum(request.output_len for request in requests)
        start_tokens, start_s = engine.stats().output_tokens, engine.now()
        system = engine.describe()["system"]

        def fraction_done() -> float:
            return (engine.stats().output_tokens - start_tokens) / total

        with (
            self.timeline.traced(engine, setting, fraction_done, simulated=simulated),
            progress_bar(f"simulating {system}" if simulated else system) as report,
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

    def report(self, records: Sequence[Mapping[str, Any]], *remarks: str) -> None:
        """Print the systems side by side and what is to be said of them, and write the figures if asked for."""
        stdout_console().print(figures_table(records))
        for line in filter(None, (*map(unfinished_line, records), *remarks)):
            print(line)
        if self.output is not None and not save_result(self.output, json.dumps(records, indent=1) + "\n"):
            raise InputError(f"--output {self.output} was not written")


def unfinished_line(record: Mapping[str, Any]) -> str:
    """How many requests are not in the first two figures; empty if none."""
    if not record["failed"]:
        return ""
    total = record["completed"] + record["failed"]
    what = "requests were refused or cut short: tok/s and s/token leave them out"
    return f"{record['system']}: {record['failed']} of {total} {what}"


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
