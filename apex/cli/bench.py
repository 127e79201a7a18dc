"""`apex bench`: the same fixed-size requests, all at once, through one system after the other."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from apex.cli.config_file import ConfigFile
from apex.cli.errors import InputError, input_errors
from apex.cli.flags import (
    BestEffortFlags,
    EngineFlags,
    ModelName,
    OutputFile,
    ProfileFile,
    StrategyFlags,
    SystemName,
    TimelineFlags,
    check_output_file,
    check_output_folder,
    check_systems,
    running_engine,
)
from apex.cli.output import number, ratio, stdout_console, strategy_mix, table
from apex.cli.validate import optional_module
from apex.perf.online import OPERATIONS
from apex.perf.progress import progress_bar
from apex.placement.budget import Workload
from apex.replay.loop import check_requests, replay_requests
from apex.replay.metrics import Targets, compute_metrics, predicted_over_actual
from apex.replay.records import Replay, ReplayRequest, RequestRecord
from apex.strategy import StrategyConfig
from swiftllm.model.hub import model_name

if TYPE_CHECKING:
    from rich.table import Table

    from swiftllm.engine.engine import Engine

WARM_UP_REQUESTS, WARM_UP_INPUT_LEN, WARM_UP_OUTPUT_LEN = 2, 32, 4
STALL_TIMEOUT_S = 3600.0  # one iteration of a large model on one core takes minutes


@dataclass(frozen=True)
class BenchRun:
    """One system's run: its figures, a record per request, and the engine's description of itself."""

    figures: dict[str, Any]
    records: Sequence[RequestRecord]
    description: Mapping[str, Any]


@dataclass(frozen=True)
class Bench(ConfigFile):
    """Measure throughput offline: requests of one size, all there from the start.

    With --best-effort-requests there are two classes, each of one size.

    For example:

      apex bench MODEL --system swiftllm neo apex --num-gpu-blocks 64
      apex bench MODEL --num-requests 64 --input-len 128 --output-len 128 --output bench.json
      apex bench MODEL --system sarathi omniserve --best-effort-requests 100 --duration-s 60

    Each request is decoded greedily to its last token. Cap the GPU tier (--num-gpu-blocks) to see what offloading is
    for: a small model is not short of memory otherwise. Without a GPU the lane stands for one: where several systems
    are compared it has one thread in all of them, unless --lane-threads says otherwise.
    """

    model: ModelName
    """A Llama-family model: a Hugging Face folder, or a name on its hub such as meta-llama/Llama-3.1-8B."""
    system: tuple[SystemName, ...] = ("apex",)
    """Systems to measure one after the other; ratios are to the first."""
    num_requests: int = 16
    """Requests, all at once."""
    input_len: int = 64
    """Prompt tokens of each."""
    output_len: int = 32
    """Output tokens of each."""
    prompt_file: OutputFile = None
    """Take the prompts from this text; by default they are random tokens."""
    output: OutputFile = None
    """Write the figures to this JSON file too."""
    results_dir: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Keep figures, raw records and provenance too, in bench/<run>/ of this folder, as all measurements are kept."""
    profile: ProfileFile = None
    """Profile table to use; by default the cached one, measured on the first start."""
    best_effort: BestEffortFlags = field(default_factory=BestEffortFlags)
    engine: EngineFlags = field(default_factory=EngineFlags)
    strategy: StrategyFlags = field(default_factory=StrategyFlags)
    timeline: TimelineFlags = field(default_factory=TimelineFlags)

    def run(self) -> int:
        for name in ("num_requests", "input_len", "output_len"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} must be at least 1")
        check_systems(self.system)
        self.best_effort.check_flags()
        self.timeline.check_flags(self.system)
        check_output_file("--output", self.output)
        check_output_folder("--results-dir", self.results_dir)
        results = self.results_dir and optional_module("evaluation.results.bench", "apex bench --results-dir")
        runs: list[BenchRun] = []
        with input_errors():
            config, strategy = self.engine.config(self.model), self.strategy.config(*self.system)
        if len(self.system) > 1 and config.lane_threads is None:
            config = replace(config, lane_threads=1)
        for system in self.system:
            with running_engine(system, config, strategy, self.profile, self._workload()) as engine:
                if not runs:
                    self._print_setting(engine)
                runs.append(self._measure(engine, strategy))
        records = [run.figures for run in runs]
        stdout_console().print(figures_table(records))
        for line in (*map(unfinished_line, records), *map(correction_line, records)):
            if line:
                print(line)
        if self.output is not None:
            with input_errors():
                self.output.write_text(json.dumps(records, indent=1) + "\n")
        if results:
            engine_options = {name: value for name, value in asdict(config).items() if name != "model"}
            sizes = {name: getattr(self, name) for name in ("num_requests", "input_len", "output_len")}
            sizes |= {"best_effort": asdict(self.best_effort)} if self.best_effort != BestEffortFlags() else {}
            prompts = self.prompt_file and str(self.prompt_file)
            setting = {"engine": engine_options, "strategy": asdict(strategy), **sizes, "prompt_file": prompts}
            with input_errors():
                folder = results.save_bench(Path(config.model), setting, runs, self.results_dir)
            print(f"summary, raw records and provenance: {folder}")
        return 0

    def _workload(self) -> Workload:
        """The requests, with mean lengths where there are two classes."""
        rest = self.best_effort.best_effort_requests
        number = self.num_requests + rest
        own, others = (self.input_len, self.output_len), self.best_effort.sizes(self.input_len, self.output_len)
        means = [(self.num_requests * a + rest * b) / number for a, b in zip(own, others, strict=True)]
        return Workload(number, *means)

    def _measure(self, engine: Engine, strategy: StrategyConfig) -> BenchRun:
        rest_input_len, rest_output_len = self.best_effort.sizes(self.input_len, self.output_len)
        rest = self.best_effort.words(self.input_len, self.output_len)
        with input_errors():
            num_rest = self.best_effort.best_effort_requests
            prompts = self._prompts(engine, [self.input_len] * self.num_requests + [rest_input_len] * num_rest)
            requests = [
                ReplayRequest(str(i), 0.0, prompt, self.output_len)
                for i, prompt in enumerate(prompts[: self.num_requests])
            ]
            requests += self.best_effort.requests(prompts[self.num_requests :], rest_output_len)
            warm_up = [
                ReplayRequest(f"warm-up-{i}", 0.0, prompts[0][:WARM_UP_INPUT_LEN], WARM_UP_OUTPUT_LEN)
                for i in range(WARM_UP_REQUESTS)
            ]
            check_requests(engine, [*warm_up, *requests])
        # First calls pay for caches and lazy initialisation, which no measurement may contain.
        replay_requests(engine, warm_up, stall_timeout_s=STALL_TIMEOUT_S)
        start_tokens, start_s = engine.stats().output_tokens, engine.now()
        total = sum(request.output_len for request in requests)
        description = engine.describe()
        on_cpu = engine.backend.device.type == "cpu"
        clock = "" if on_cpu else "; times are the host's, which launches ahead of the GPU"

        def fraction_done() -> float:
            return (engine.stats().output_tokens - start_tokens) / total

        with (
            self.timeline.traced(engine, self._setting(engine) + clock, fraction_done),
            progress_bar(description["system"]) as report,
        ):

            def show(tokens: int) -> None:
                report(tokens / total, f"{tokens}/{total} tokens, {tokens / (engine.now() - start_s):.0f}/s")

            limits = {"stall_timeout_s": STALL_TIMEOUT_S, "limit_s": self.best_effort.limit_s}
            replay = replay_requests(engine, requests, show, **limits)
        values = {
            "system": description["system"],
            "backend": f"torch-{engine.backend.device.type}",
            "gpu": None if on_cpu else description["device"],
            "model": model_name(description["model"]),
            "dtype": description["dtype"],
            "workload": f"{self.num_requests} x {self.input_len} in / {self.output_len} out{rest}",
            "num_gpu_blocks": description["num_gpu_blocks"],
            "num_cpu_blocks": description["num_cpu_blocks"],
            **figures(replay, strategy, self.best_effort.duration_s),
            **{f"{name}_factor": engine.policy.prediction_factors.get(name) for name in OPERATIONS},
        }
        return BenchRun(values, replay.records, description)

    def _prompts(self, engine: Engine, lengths: Sequence[int]) -> list[tuple[int, ...]]:
        """Prompts that begin differently: random tokens, or the text of a file read round and round."""
        if self.prompt_file is None:
            draw = random.Random(self.engine.seed)
            size = engine.backend.model_config.vocab_size
            return [tuple(draw.randrange(size) for _ in range(length)) for length in lengths]
        if engine.tokenizer is None:
            raise ValueError("the model folder has no tokenizer (tokenizer.json) to read --prompt-file with")
        text = engine.tokenizer.encode(self.prompt_file.read_text())
        if len(text) < len(lengths):
            raise ValueError(
                f"--prompt-file {self.prompt_file} has {len(text)} tokens: too few for {len(lengths)} prompts "
                "that begin differently"
            )
        starts = [i * len(text) // len(lengths) for i in range(len(lengths))]
        return [
            tuple(text[(start + i) % len(text)] for i in range(length))
            for start, length in zip(starts, lengths, strict=True)
        ]

    def _print_setting(self, engine: Engine) -> None:
        """What runs, and how many of the requests each tier holds at once."""
        description = engine.describe()
        per_request = -(-(self.input_len + self.output_len - 1) // description["block_size"])
        tiers = ", ".join(
            f"{blocks} {tier} blocks ({blocks // per_request} requests)"
            for tier, blocks in (("GPU", description["num_gpu_blocks"]), ("CPU", description["num_cpu_blocks"]))
        )
        rest = self.best_effort.words(self.input_len, self.output_len)
        print(
            f"{self._setting(engine)}\n"
            f"{self.num_requests} requests of {self.input_len} in / {self.output_len} out{rest}; {tiers}\n"
        )

    def _setting(self, engine: Engine) -> str:
        description = engine.describe()
        return (
            f"{model_name(description['model'])} ({description['dtype']}) on {description['device']}; "
            f"{description['cpu_threads']} CPU attention thread(s), kernel {description['cpu_kernel']}"
        )


def figures(replay: Replay, strategy: StrategyConfig, duration_s: float | None = None) -> dict[str, Any]:
    """Flat figures of one run: every metric, and what the engine counted.

    Targets are those of ``strategy``. ``duration_s`` is the duration of a run that is cut after it.
    """
    stats, targets = replay.stats, Targets(strategy.ttft_slo_s, strategy.tpot_slo_s)
    return {
        **compute_metrics(replay.records, replay.wall_s, stats, targets, duration_s),
        "preemptions": stats["preemptions"],
        "predicted_over_actual": predicted_over_actual(stats),
        "strategy_mix": strategy_mix(stats["strategy_iterations"]),
    }


def correction_line(record: Mapping[str, Any]) -> str:
    """What a system's predictions were multiplied by at the end of its run; empty where the profile held."""
    factors = {name: record[f"{name}_factor"] for name in OPERATIONS}
    if all(factor in (None, 1.0) for factor in factors.values()):
        return ""
    parts = [f"{name.replace('_', ' ')} x {factor:.2f}" for name, factor in factors.items()]
    return f"{record['system']}: times of the profile corrected, {', '.join(parts)}"


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
    has_classes = any(record.get("service_class") == "both" for record in records)
    rows = [
        (
            record["system"],
            number(record["output_tokens_per_s"], ".1f"),
            number(ratio(record["output_tokens_per_s"], first), ".2f"),
            number(record["per_token_latency_s_mean"], ".3f"),
            *class_cells(record, has_classes),
            number(record["lane_busy_fraction"], ".0%"),
            number(record["cpu_busy_fraction"], ".0%"),
            str(record["preemptions"]),
            number(record["predicted_over_actual"], ".2f"),
            record["strategy_mix"],
        )
        for record in records
    ]
    of_classes = ("in SLO", "BE tok/s") if has_classes else ()
    columns = ("system", "tok/s", f"/{records[0]['system']}", "s/token", *of_classes, "lane", "CPU", "preempted",
               "pred/actual", "strategy mix")  # fmt: skip
    return table(columns, rows, left=("system", "strategy mix"))


def class_cells(record: Mapping[str, Any], has_classes: bool) -> tuple[str, ...]:
    """The share of latency-sensitive requests within their targets, and best-effort tokens per second."""
    if not has_classes:
        return ()
    return number(record["slo_attainment"], ".1%"), number(record["best_effort_tokens_per_s"], ".1f")
