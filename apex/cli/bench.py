"""`apex bench`: the same fixed-size requests, all at once, through one system after the other."""

from __future__ import annotations

import json
import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import tyro

from apex.cli.config_file import ConfigFile
from apex.cli.errors import InputError, input_errors
from apex.cli.flags import (
    EngineFlags,
    ModelName,
    OutputFile,
    ProfileFile,
    StrategyFlags,
    SystemName,
    TimelineFlags,
    check_output_file,
    check_output_folder,
    running_engine,
)
from apex.cli.output import number, ratio, stdout_console, strategy_mix, table
from apex.cli.validate import optional_module
from apex.perf.progress import progress_bar
from swiftllm.core.request import Request, SamplingParams
from swiftllm.model.hub import model_name

if TYPE_CHECKING:
    from rich.table import Table

    from swiftllm.engine.engine import Engine, EngineStats

WARM_UP = SamplingParams(max_tokens=4, ignore_eos=True)
WARM_UP_REQUESTS = 2
WARM_UP_INPUT_LEN = 32


@dataclass(frozen=True)
class BenchRun:
    """One system's run: its figures, its requests, when it began on the engine's clock, and what the engine says."""

    figures: dict[str, Any]
    requests: list[Request]
    start_s: float
    description: Mapping[str, Any]


@dataclass(frozen=True)
class Bench(ConfigFile):
    """Measure throughput offline: requests of one size, all there from the start.

    For example:

      apex bench MODEL --system swiftllm neo apex --num-gpu-blocks 64
      apex bench MODEL --num-requests 64 --input-len 128 --output-len 128 --output bench.json

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
    engine: EngineFlags = field(default_factory=EngineFlags)
    strategy: StrategyFlags = field(default_factory=StrategyFlags)
    timeline: TimelineFlags = field(default_factory=TimelineFlags)

    def run(self) -> int:
        for name in ("num_requests", "input_len", "output_len"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} must be at least 1")
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
            with running_engine(system, config, strategy, self.profile) as engine:
                if not runs:
                    self._print_setting(engine)
                runs.append(self._measure(engine))
        records = [run.figures for run in runs]
        stdout_console().print(figures_table(records))
        if self.output is not None:
            with input_errors():
                self.output.write_text(json.dumps(records, indent=1) + "\n")
        if results:
            engine_options = {name: value for name, value in asdict(config).items() if name != "model"}
            sizes = {name: getattr(self, name) for name in ("num_requests", "input_len", "output_len")}
            prompts = self.prompt_file and str(self.prompt_file)
            setting = {"engine": engine_options, "strategy": asdict(strategy), **sizes, "prompt_file": prompts}
            with input_errors():
                folder = results.keep(Path(config.model), setting, runs, self.output_len, self.results_dir)
            print(f"summary, raw records and provenance: {folder}")
        return 0

    def _measure(self, engine: Engine) -> BenchRun:
        with input_errors():
            prompts = self._prompts(engine)
            for index in range(WARM_UP_REQUESTS):
                engine.add_request(f"warm-up-{index}", prompts[0][:WARM_UP_INPUT_LEN], WARM_UP)
        # First calls pay for caches and lazy initialisation: no system shall pay for having come first.
        while engine.has_unfinished():
            engine.step()
        before = replace(engine.stats(), strategy_iterations=Counter(engine.stats().strategy_iterations))
        sampling = SamplingParams(max_tokens=self.output_len, ignore_eos=True)
        start_s = engine.now()
        with input_errors():
            requests = [engine.add_request(str(i), prompt, sampling, start_s) for i, prompt in enumerate(prompts)]
        total = self.num_requests * self.output_len

        def num_done() -> int:
            return engine.stats().output_tokens - before.output_tokens

        description = engine.describe()
        on_cpu = engine.backend.device.type == "cpu"
        clock = "" if on_cpu else "; times are the host's, which launches ahead of the GPU"
        with (
            self.timeline.traced(engine, self._setting(engine) + clock, lambda: num_done() / total),
            progress_bar(description["system"]) as report,
        ):
            while engine.has_unfinished():
                engine.step()
                done = num_done()
                report(done / total, f"{done}/{total} tokens, {done / (engine.now() - start_s):.0f}/s")
        told = {
            "system": description["system"],
            "backend": f"torch-{engine.backend.device.type}",
            "gpu": None if on_cpu else description["device"],
            "model": model_name(description["model"]),
            "dtype": description["dtype"],
            "workload": f"{self.num_requests} x {self.input_len} in / {self.output_len} out",
            "num_gpu_blocks": description["num_gpu_blocks"],
            "num_cpu_blocks": description["num_cpu_blocks"],
            **figures(requests, engine.now() - start_s, engine.stats(), before),
        }
        return BenchRun(told, requests, start_s, description)

    def _prompts(self, engine: Engine) -> list[list[int]]:
        """Prompts that begin differently: random tokens, or the text of a file read round and round."""
        if self.prompt_file is None:
            draw = random.Random(self.engine.seed)
            size = engine.backend.model_config.vocab_size
            return [[draw.randrange(size) for _ in range(self.input_len)] for _ in range(self.num_requests)]
        if engine.tokenizer is None:
            raise ValueError("the model folder has no tokenizer (tokenizer.json) to read --prompt-file with")
        text = engine.tokenizer.encode(self.prompt_file.read_text())
        if len(text) < self.num_requests:
            raise ValueError(
                f"--prompt-file {self.prompt_file} has {len(text)} tokens: too few for {self.num_requests} prompts "
                "that begin differently"
            )
        starts = [i * len(text) // self.num_requests for i in range(self.num_requests)]
        return [[text[(start + i) % len(text)] for i in range(self.input_len)] for start in starts]

    def _print_setting(self, engine: Engine) -> None:
        """What runs, and how many of the requests each tier holds at once."""
        told = engine.describe()
        per_request = -(-(self.input_len + self.output_len - 1) // told["block_size"])
        tiers = ", ".join(
            f"{blocks} {tier} blocks ({blocks // per_request} requests)"
            for tier, blocks in (("GPU", told["num_gpu_blocks"]), ("CPU", told["num_cpu_blocks"]))
        )
        print(
            f"{self._setting(engine)}\n"
            f"{self.num_requests} requests of {self.input_len} in / {self.output_len} out; {tiers}\n"
        )

    def _setting(self, engine: Engine) -> str:
        told = engine.describe()
        return (
            f"{model_name(told['model'])} ({told['dtype']}) on {told['device']}; "
            f"{told['cpu_threads']} CPU attention thread(s), kernel {told['cpu_kernel']}"
        )


def figures(requests: Sequence[Request], wall_s: float, stats: EngineStats, before: EngineStats) -> dict[str, Any]:
    """Flat figures of one run: its requests, its seconds, the engine's counters after and before it."""
    latencies = [(request.token_times_s[-1] - request.arrival_s) / request.output_len for request in requests]
    tokens = sum(request.output_len for request in requests)
    predicted_s = stats.predicted_s - before.predicted_s
    return {
        "output_tokens_per_s": tokens / wall_s,
        "requests_per_s": len(requests) / wall_s,
        "per_token_latency_s_mean": statistics.fmean(latencies),
        "per_token_latency_s_p99": float(np.percentile(latencies, 99)),
        "completed": len(requests),
        "failed": 0,
        "wall_s": wall_s,
        "lane_busy_fraction": (stats.lane_busy_s - before.lane_busy_s) / wall_s,
        "cpu_busy_fraction": (stats.cpu_busy_s - before.cpu_busy_s) / wall_s,
        "preemptions": stats.preemptions - before.preemptions,
        "predicted_over_actual": ratio(predicted_s or None, stats.duration_s - before.duration_s),
        "strategy_mix": strategy_mix(Counter(stats.strategy_iterations) - Counter(before.strategy_iterations)),
    }


def figures_table(records: Sequence[Mapping[str, Any]]) -> Table:
    """The systems side by side; ratios are to the first."""
    first = records[0]["output_tokens_per_s"]
    rows = [
        (
            record["system"],
            number(record["output_tokens_per_s"], ".1f"),
            number(ratio(record["output_tokens_per_s"], first), ".2f"),
            number(record["per_token_latency_s_mean"], ".3f"),
            number(record["lane_busy_fraction"], ".0%"),
            number(record["cpu_busy_fraction"], ".0%"),
            str(record["preemptions"]),
            number(record["predicted_over_actual"], ".2f"),
            record["strategy_mix"],
        )
        for record in records
    ]
    columns = ("system", "tok/s", f"/{records[0]['system']}", "s/token", "lane", "CPU", "preempted", "pred/actual",
               "strategy mix")  # fmt: skip
    return table(columns, rows, left=("system", "strategy mix"))
