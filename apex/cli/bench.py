"""`apex bench`: the same requests through one system after the other."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from apex.cli.options import (
    BestEffortFlags,
    EngineFlags,
    ModelName,
    OutputFile,
    ProfileFile,
    StrategyFlags,
    SystemName,
    TimelineFlags,
    check_output_folder,
    running_engine,
)
from apex.cli.output import input_errors, optional_module
from apex.cli.systems_command import Remaining, SystemsCommand
from apex.cli.traffic import AT_ONCE, TrafficFlags
from apex.perf.online_correction import OPERATIONS
from apex.placement.search import UniformLoad
from apex.replay.loop import check_requests, replay_requests
from apex.replay.records import ReplayRequest, RequestRecord
from apex.strategy import StrategyConfig
from swiftllm.model.folder import model_name

if TYPE_CHECKING:
    from swiftllm.engine.engine import Engine

WARM_UP_REQUESTS, WARM_UP_INPUT_LEN, WARM_UP_OUTPUT_LEN = 2, 32, 4
STALL_TIMEOUT_S = 3600.0  # one iteration of a large model on one core takes minutes


@dataclass(frozen=True)
class BenchRun:
    """One system's run: its figures, a record per request, and the engine's description of itself."""

    figures: dict[str, Any]
    records: Sequence[RequestRecord]
    description: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The system, and its load unless all requests came at once."""
        load = self.figures["load"]
        return self.figures["system"] + ("" if load == AT_ONCE else f"-{load.replace(' ', '-')}")


@dataclass(frozen=True)
class Bench(SystemsCommand):
    """Measure throughput and latency: requests of one size, all there from the start, or those of a --workload.

    With --best-effort-requests there are two classes, the second of one size.

    For example:

      apex bench MODEL --system swiftllm neo apex --num-gpu-blocks 64
      apex bench MODEL --num-requests 64 --input-len 128 --output-len 128 --output bench.json
      apex bench MODEL --system sarathi omniserve --best-effort-requests 100 --duration-s 60
      apex bench MODEL --system swiftllm apex --workload monday.csv --request-rate 1 2 --slo-ttft 2 --slo-tpot 0.2

    Each request is decoded greedily to its last token. Cap the GPU tier (--num-gpu-blocks) to see what offloading is
    for: a small model is not short of memory otherwise. Without a GPU the GPU batch stands for one: where several
        systems are compared it has one thread in all of them, unless --gpu-batch-threads says otherwise.
    """

    model: ModelName
    """A Hugging Face folder, or a name on its hub such as meta-llama/Llama-3.1-8B."""
    system: tuple[SystemName, ...] = ("apex",)
    """Systems to measure one after the other; ratios are to the first."""
    num_requests: int = 16
    """Requests of each run."""
    input_len: int = 64
    """Prompt tokens of each, without --workload."""
    output_len: int = 32
    """Output tokens of each, without --workload."""
    prompt_file: OutputFile = None
    """Take the prompts from this text; by default they are random tokens."""
    output: OutputFile = None
    """Write the figures to this JSON file too."""
    results_dir: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Keep figures, raw records and provenance too, in bench/<run>/ of this folder, as all measurements are kept."""
    profile: ProfileFile = None
    """Profile table to use; by default the cached one, measured on the first start."""
    traffic: TrafficFlags = field(default_factory=TrafficFlags)
    best_effort: BestEffortFlags = field(default_factory=BestEffortFlags)
    engine: EngineFlags = field(default_factory=EngineFlags)
    strategy: StrategyFlags = field(default_factory=StrategyFlags)
    timeline: TimelineFlags = field(default_factory=TimelineFlags)

    def run(self) -> int:
        self.check_flags()
        check_output_folder("--results-dir", self.results_dir)
        results = self.results_dir and optional_module("evaluation.results.folder", "apex bench --results-dir")
        runs: list[BenchRun] = []
        with input_errors():
            config = self.engine.config(self.model)
            strategy = self.traffic.with_targets(self.strategy.config(*self.system))
            loads = self.loads
        if len(self.system) > 1 and config.gpu_batch_threads is None:
            config = replace(config, gpu_batch_threads=1)
        tokens = [lengths.total_output_tokens for lengths in loads.values()]
        remaining = Remaining("bench", tokens * len(self.system))
        setting = ""
        for system in self.system:
            with running_engine(system, config, strategy, self.profile, self.workload()) as engine:
                if not runs:
                    setting = self._setting(engine)
                    self._print_setting(engine)
                for load in loads:
                    runs.append(self._measure(engine, strategy, load))
                    remaining.ended()
        order = list(loads)
        records = sorted((run.figures for run in runs), key=lambda record: order.index(record["load"]))
        self.report(records, "MEASURED", f"{setting}\n{self.request_words}", *map(correction_line, records))
        if results:
            engine_options = {name: value for name, value in asdict(config).items() if name != "model"}
            sizes = {name: getattr(self, name) for name in ("num_requests", "input_len", "output_len")}
            sizes |= {"best_effort": asdict(self.best_effort)} if self.best_effort != BestEffortFlags() else {}
            sizes |= {"loads": [one.identity for one in loads.values()]} if self.traffic.is_service else {}
            prompts = self.prompt_file and str(self.prompt_file)
            identity = {"engine": engine_options, "strategy": asdict(strategy), **sizes, "prompt_file": prompts}
            with input_errors():
                folder = results.save_bench(Path(config.model), identity, runs, self.results_dir)
            print(f"summary, raw records and provenance: {folder}")
        return 0

    @property
    def seed_of_requests(self) -> int:
        return self.engine.seed

    def workload(self) -> UniformLoad:
        """The requests, with mean lengths."""
        input_lens, output_lens = zip(*self.sizes(self.first_load), strict=True)
        return UniformLoad(len(input_lens), fmean(input_lens), fmean(output_lens))

    def _measure(self, engine: Engine, strategy: StrategyConfig, load: str) -> BenchRun:
        with input_errors():
            lengths = self.loads[load]
            requests = self.requests(lengths, self.prompts(lengths, partial(self._prompts, engine)))
            prompt = requests[0].prompt_token_ids[:WARM_UP_INPUT_LEN]
            warm_up = [ReplayRequest(f"warm-up-{i}", 0.0, prompt, WARM_UP_OUTPUT_LEN) for i in range(WARM_UP_REQUESTS)]
            # A request of a workload that is too long is a result, one of a given size is a mistake.
            check_requests(engine, [*warm_up, *(requests if self.traffic.workload is None else [])])
        # First calls pay for caches and lazy initialisation, which no measurement may contain.
        replay_requests(engine, warm_up, stall_timeout_s=STALL_TIMEOUT_S)
        engine.reset_prefix_cache()
        description = engine.describe()
        on_cpu = description["device_type"] == "cpu"
        clock = "" if on_cpu else "; times are the host's, which launches ahead of the GPU"
        replay = self.replay(engine, requests, self._setting(engine) + clock, load, stall_timeout_s=STALL_TIMEOUT_S)
        values = {
            "system": description["system"],
            "backend": f"torch-{description['device_type']}",
            "gpu": None if on_cpu else description["device"],
            "model": model_name(description["model"]),
            "dtype": description["dtype"],
            **self.load_values(load),
            "num_gpu_blocks": description["num_gpu_blocks"],
            "num_cpu_blocks": description["num_cpu_blocks"],
            **self.figures(replay, strategy),
            **{f"{name}_factor": engine.scheduler.prediction_factors.get(name) for name in OPERATIONS},
        }
        return BenchRun(values, replay.records, description)

    def _prompts(self, engine: Engine, lengths: Sequence[int]) -> list[tuple[int, ...]]:
        """Prompts that begin differently: random tokens, or the text of a file read round and round."""
        if self.prompt_file is None:
            draw = random.Random(self.engine.seed)
            size = engine.vocab_size
            return [tuple(draw.randrange(size) for _ in range(length)) for length in lengths]
        if engine.tokenizer is None:
            raise ValueError("the model folder has no tokenizer (tokenizer.json) to read --prompt-file with")
        text = engine.tokenizer.encode(self.prompt_file.read_text(encoding="utf-8-sig"))
        if len(text) < len(lengths):
            raise ValueError(
                f"--prompt-file {self.prompt_file} has {len(text)} tokens: too few for {len(lengths)} prompts "
                "that begin differently"
            )
        starts = [i * len(text) // len(lengths) for i in range(len(lengths))]
        places = [range(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        return [tuple(text[i % len(text)] for i in place) for place in places]

    def _print_setting(self, engine: Engine) -> None:
        """What runs, and how many of the requests each tier holds at once."""
        description = engine.describe()
        mean = self.first_load.mean_input_tokens + self.first_load.mean_output_tokens
        per_request = engine.kv.blocks_for(round(mean) - 1)
        blocks = {tier: description[f"num_{tier.lower()}_blocks"] for tier in ("GPU", "CPU")}
        tiers = ", ".join(f"{n} {tier} blocks ({n // per_request} requests)" for tier, n in blocks.items())
        requests = self.request_words if self.traffic.is_service else self.size_words
        print(f"{self._setting(engine)}\n{requests}{self.best_effort_words}; {tiers}\n")

    def _setting(self, engine: Engine) -> str:
        description = engine.describe()
        return (
            f"{model_name(description['model'])} ({description['dtype']}) on {description['device']}; "
            f"{description['cpu_threads']} CPU attention thread(s), kernel {description['cpu_kernel']}"
        )


def correction_line(record: Mapping[str, Any]) -> str:
    """What a system's predictions were multiplied by at the end of its run; empty where the profile held."""
    factors = {name: record[f"{name}_factor"] for name in OPERATIONS}
    if all(factor in (None, 1.0) for factor in factors.values()):
        return ""
    parts = [f"{OPERATIONS[name]} x {factor:.2f}" for name, factor in factors.items()]
    return f"{record['system']}: times of the profile corrected, {', '.join(parts)}"
