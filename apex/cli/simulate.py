"""`apex simulate`: predicted hardware, so that a strategy can be tried on a GPU that is not here."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from apex.cli.options import BestEffortFlags, OutputFile, StrategyFlags, SystemName, TimelineFlags
from apex.cli.output import input_errors, stdout_console
from apex.cli.systems_command import SystemsCommand
from apex.replay.loop import check_requests
from apex.replay.records import REFUSED, Replay, ReplayRequest
from apex.simulator.backend import VLLM, VLLM_DEFAULTS, SimulatedBackend, vllm_runtime
from apex.simulator.bound import decode_bound
from apex.simulator.build import build_simulated
from apex.strategy import StrategyConfig
from swiftllm.config import CpuKVDtype, EngineConfig
from swiftllm.core.request import Tier
from swiftllm.kv.block_pool import LayerGroups
from swiftllm.systems import find_system

if TYPE_CHECKING:
    from apex.simulator.predicted_machine import PlacedMachine, PredictedMachine
    from swiftllm.engine.engine import Engine

VOCABULARY = 1 << 20
Dtype = Literal["float16", "bfloat16"]
Weights = Literal["auto", "int4"]


@dataclass(frozen=True)
class Simulate(SystemsCommand):
    """Predict throughput and latency on hardware that is not here: real scheduling, simulated times.

    For example:

      apex simulate
      apex simulate --gpu t4 --host g4dn-4xlarge --model llama-2-7b --input-len 200
      apex simulate --system vllm apex --request-rate 2 --trace-timeline pictures
      apex simulate --system sarathi omniserve --request-rate 1 --best-effort-requests 500 --duration-s 600
      apex simulate --gpu t4 --host g4dn-4xlarge --model llama-2-13b --weights-gpu-memory auto
      apex simulate --gpu a100 --tensor-parallel 4 --link pcie-4 --model llama-2-70b --dtype bfloat16

    GPU, host, link and model are names of files in configs/, or paths to files of your own. How times are predicted,
    and how far off the predictions are, is in docs/simulator.md. Requests are all of one size; with
    --best-effort-requests there are two classes, each of one size.
    """

    system: tuple[SystemName, ...] = ("swiftllm", "neo", "apex")
    """Systems to simulate one after the other; ratios are to the first."""
    gpu: str = "a10"
    """GPU: a name or a .yaml file."""
    tensor_parallel: int = 1
    """GPUs among which every layer is divided; their memories add up."""
    link: str | None = None
    """What joins several GPUs: a name (pcie-4, pcie-5, nvlink-4) or a .yaml file."""
    host: str = "dual-xeon-6342"
    """Host: a name or a .yaml file."""
    cpu_hosts: int = 1
    """Equal hosts that compute CPU attention: the GPUs' own, whose memory is used first, and others over a network."""
    network_gbps: float = 100.0
    """Gigabits per second between the GPUs' host and the others, in each direction."""
    model: str = "llama-3.1-8b"
    """Model: a name in configs/models, a Hugging Face folder, or a name on its hub; only config.json is read."""
    dtype: Dtype = "float16"
    """Weights, activations and KV cache."""
    weights: Weights = "auto"
    """auto: as config.json says; int4: the layers' matrices in 4 bits, by a kernel whose speed is an assumption."""
    weights_gpu_memory: float | Literal["auto"] | None = None
    """GiB of GPU memory for weights; the others are streamed over PCIe or computed by the CPU. auto: as many as give
    the highest predicted throughput. By default all weights must fit."""
    cpu_kernel: str = "native"
    """CPU attention kernel: native, ispc or llamafile."""
    cpu_kv_dtype: CpuKVDtype = "auto"
    """K and V in the CPU tier: auto as --dtype; int8, with a scale per token and head, in about half of the bytes."""
    cpu_bandwidth_gb_s: float | None = None
    """GB/s at which CPU attention reads the KV cache; by default the host's, times the kernel's share of it."""
    num_requests: int = 200
    """Requests."""
    input_len: int = 1000
    """Prompt tokens of each."""
    output_len: int = 200
    """Output tokens of each."""
    request_rate: float | None = None
    """Requests per second, arriving at random (Poisson); by default all are there from the start."""
    num_gpu_blocks: int | None = None
    """KV blocks of the GPU tier; by default what 90% of the GPUs' memory leaves beside the weights."""
    num_cpu_blocks: int | None = None
    """KV blocks of the CPU tier; by default half of the hosts' memory."""
    block_size: int = 16
    """Tokens per KV-cache block, in both tiers."""
    max_num_batched_tokens: int = 2048
    """Tokens in the GPU batch of one iteration at most; longer prompts prefill in chunks."""
    max_num_seqs: int = 1024
    """Requests that hold KV cache at once at most, in both tiers together."""
    seed: int = 0
    """Seed of the arrivals."""
    output: OutputFile = None
    """Write the figures to this JSON file too."""
    best_effort: BestEffortFlags = field(default_factory=BestEffortFlags)
    strategy: StrategyFlags = field(default_factory=StrategyFlags)
    timeline: TimelineFlags = field(default_factory=TimelineFlags)

    def run(self) -> int:
        self.check_flags()
        with input_errors(of_engine=False):
            from apex.simulator.predicted_machine import predict_machine

            machine = predict_machine(
                self.gpu,
                self.host,
                self.model,
                self.dtype,
                tensor_parallel=self.tensor_parallel,
                link_name=self.link,
                cpu_hosts=self.cpu_hosts,
                network_gbps=self.network_gbps,
                weights=self.weights,
                cpu_kernel=self.cpu_kernel,
                cpu_kv_dtype=self.cpu_kv_dtype,
                cpu_bandwidth_gb_s=self.cpu_bandwidth_gb_s,
                block_size=self.block_size,
                max_tokens=self.max_num_batched_tokens,
            )
            strategy = self.strategy.config(*self.system)
            placed = {system: self._placed(system, machine) for system in self.system}
            blocks = {system: self._blocks(machine, placed[system]) for system in self.system}
        rate = "all at once" if self.request_rate is None else f"{self.request_rate:g} a second"
        counts = {
            system: f"{gpu} GPU and {cpu} CPU blocks of {self.block_size} tokens"
            for system, (gpu, cpu) in blocks.items()
        }
        sizes = f"{self.num_requests} requests of {self.input_len} in / {self.output_len} out"
        workload = f"{sizes}, {rate}{self.best_effort_words}"
        if self.weights_gpu_memory is None:
            print(f"{workload}; {counts[self.system[0]]}")
        else:
            print(workload)
            for system, machine_placed in placed.items():
                assert machine_placed is not None, "weights have their memory"
                print(f"{system}: {machine_placed.timed.describe()}; {counts[system]}")
        # Prompts share no prefix: vLLM's cache would find it.
        prompts = [(i % VOCABULARY,) * n for i, (n, _) in enumerate(self.sizes)]
        requests, records, why_none = self.requests(prompts, self.arrivals_s()), [], []
        for system in self.system:
            with input_errors(of_engine=False):
                engine = self._engine(system, machine, blocks[system], strategy, placed[system])
                check_requests(engine, [requests[0], requests[-1]])  # those of a class are of one size
            measured, replay = self._measure(engine, requests, machine, strategy)
            why_none.append(all_refused_line(system, replay))
            gpu_blocks, cpu_blocks = blocks[system]
            records.append(measured | {"num_gpu_blocks": gpu_blocks, "num_cpu_blocks": cpu_blocks})
        bound = None
        if self.weights_gpu_memory is None and not self.best_effort_words:
            bound = self._bound(machine, blocks.values())
            records = [record | {"bound_tokens_per_s": bound[0]} for record in records]
        console = stdout_console()
        console.print(f"\n[bold]SIMULATED[/]: {machine.description}", soft_wrap=True)
        console.print(f"{machine.gpu.name} is known from {machine.how_known}", soft_wrap=True, highlight=False)
        if VLLM in self.system:
            console.print(f"{VLLM}: {VLLM_DEFAULTS}", soft_wrap=True, highlight=False)
        outside = sorted({name for record in records for name in record["extrapolated"]})
        self.report(records, f"outside the measured sizes, extrapolated: {', '.join(outside)}" if outside else "")
        if bound is not None:
            print("bound: {:,.0f} tok/s, decodes alone with GPU and CPU overlapped, {} + {} of them".format(*bound))
        for line in filter(None, why_none):
            print(f"apex: {line}", file=sys.stderr)
        return 1 if any(why_none) else 0

    def _bound(self, machine: PredictedMachine, blocks: Iterable[tuple[int, int]]) -> tuple[float, int, int]:
        context, most = self.input_len + self.output_len / 2, min(self.max_num_seqs, self.num_requests)
        per_slot = context / LayerGroups.of(machine.model, self.block_size).slots(context)
        tokens = tuple(per_slot * self.block_size * max(of_tier) for of_tier in zip(*blocks, strict=True))
        return decode_bound(machine.table, machine.model.num_layers, context, tokens, most)

    def check_flags(self) -> None:
        super().check_flags()
        of_engine = ("block_size", "max_num_batched_tokens", "max_num_seqs", "tensor_parallel", "num_gpu_blocks",
                     "num_cpu_blocks", "cpu_kv_dtype", "cpu_kernel")  # fmt: skip
        with input_errors(of_engine=False):
            EngineConfig(self.model, **{name: getattr(self, name) for name in of_engine})
            EngineConfig(self.model, weights_gpu_memory=self.weights_gpu_memory)
            if self.request_rate is not None and not 0.0 < self.request_rate < math.inf:
                raise ValueError(f"request_rate={self.request_rate} must be a positive number")
            if self.link is not None and self.tensor_parallel == 1:
                raise ValueError("--link means nothing without --tensor-parallel")
            if self.network_gbps != Simulate.network_gbps and self.cpu_hosts == 1:
                raise ValueError("--network-gbps means nothing without --cpu-hosts")

    def _placed(self, system: str, machine: PredictedMachine) -> PlacedMachine | None:
        """The machine with a placement of its weights for a system; None where all are on the GPU."""
        if self.weights_gpu_memory is None:
            return None
        from apex.placement.search import UniformLoad
        from apex.simulator.predicted_machine import WeightPlacer

        most = min(self.max_num_seqs, self.num_requests)
        at_once = UniformLoad(most, self.input_len, self.output_len)
        placer, offloads = WeightPlacer(machine, self.block_size), find_system(system).needs_predictions
        return placer.place(self.weights_gpu_memory, at_once, offloads=offloads)

    def _blocks(self, machine: PredictedMachine, placed: PlacedMachine | None) -> tuple[int, int]:
        """KV blocks of the GPU and the CPU tier."""
        if placed is None:
            return machine.num_blocks(self.num_gpu_blocks, self.num_cpu_blocks, self.block_size)
        return placed.num_blocks(self.num_gpu_blocks, self.num_cpu_blocks)

    def _engine(
        self,
        system: str,
        machine: PredictedMachine,
        blocks: tuple[int, int],
        strategy: StrategyConfig,
        placed: PlacedMachine | None,
    ) -> Engine:
        off_gpu = {} if placed is None else placed.engine_options
        as_vllm = {"runtime": vllm_runtime(self.max_num_seqs), "cached_tiers": (Tier.GPU,)} if system == VLLM else {}
        return build_simulated(
            system,
            machine.table if placed is None else placed.table,
            machine.model.num_layers,
            num_gpu_blocks=blocks[0],
            num_cpu_blocks=blocks[1],
            block_size=self.block_size,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            max_model_len=machine.model.most_positions,
            windows=machine.model.windows,
            strategy=strategy,
            remote_hosts=machine.remote_hosts,
            vocab_size=VOCABULARY,
            **as_vllm,
            **off_gpu,
        )

    def _measure(
        self, engine: Engine, requests: Sequence[ReplayRequest], machine: PredictedMachine, strategy: StrategyConfig
    ) -> tuple[dict[str, Any], Replay]:
        backend = engine.backend
        assert isinstance(backend, SimulatedBackend)
        replay = self.replay(engine, requests, machine.description, simulated=True, wait=backend.sleep)
        description = engine.describe()
        record = {
            "system": description["system"],
            "backend": "simulated",
            "gpu": machine.gpu.name,
            "tensor_parallel": machine.tensor_parallel,
            "host": machine.host.name,
            "cpu_hosts": machine.cpu_hosts,
            "model": machine.model_name,
            "dtype": machine.dtype,
            "weights": machine.table.identity.get("weights", machine.dtype),
            "placement": description["weights"],
            "workload": self.workload_words,
            "request_rate": self.request_rate,
            "cpu_attention_gb_s": float(machine.table.identity["cpu_attention_gb_s"]),
            **self.figures(replay, strategy),
            "extrapolated": sorted(backend.extrapolated),
        }
        return record, replay

    def arrivals_s(self) -> list[float]:
        """When requests come, all but the best-effort ones."""
        if self.request_rate is None:
            return [0.0] * self.num_requests
        draw, now_s, arrivals = random.Random(self.seed), 0.0, []
        for _ in range(self.num_requests):
            now_s += draw.expovariate(self.request_rate)
            arrivals.append(now_s)
        return arrivals


def all_refused_line(system: str, replay: Replay) -> str:
    """Why a system has no figures: every request was refused. Empty if one was not."""
    if not all(record.refused for record in replay.records):
        return ""
    reason = (replay.records[0].failure or "").removeprefix(REFUSED)
    return f"{system} refused every request, the first one because: {reason}"
