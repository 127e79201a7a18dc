"""`apex simulate`: predicted hardware, so that a strategy can be tried on a GPU that is not here."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from apex.cli.advice import binding, choose, serve_line
from apex.cli.options import BestEffortFlags, OutputFile, StrategyFlags, SystemName, TimelineFlags
from apex.cli.output import input_errors, stdout_console
from apex.cli.systems_command import Remaining, SystemsCommand
from apex.cli.traffic import TrafficFlags
from apex.perf.model import decode_bound
from apex.replay.loop import check_requests
from apex.replay.metrics import makespan_s
from apex.replay.records import REFUSED, Replay, ReplayRequest, RequestRecord
from apex.simulator.backend import VLLM, VLLM_DEFAULTS, SimulatedBackend, vllm_runtime
from apex.simulator.build import build_simulated
from apex.strategy import StrategyConfig
from swiftllm.config import CacheTiers, CpuKVDtype, EngineConfig
from swiftllm.kv.block_pool import LayerGroups
from swiftllm.machine import GIB
from swiftllm.systems import find_system

if TYPE_CHECKING:
    from apex.simulator.bound import Bound
    from apex.simulator.predicted_machine import PlacedMachine, PredictedMachine
    from apex.workloads.requests import Lengths
    from swiftllm.core.request import Tier
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
      apex simulate --gpu t4 --host-memory-gib 32 --model qwen2.5-7b --workload sharegpt --request-rate 0.5 1 2
      apex simulate --gpu t4 --system vllm swiftllm adaptive --workload agents --prefix-cache-tiers both
      apex simulate --system sarathi omniserve --request-rate 1 --best-effort-requests 500 --duration-s 600
      apex simulate --gpu t4 --host g4dn-4xlarge --model llama-2-13b --weights-gpu-memory auto
      apex simulate --gpu a100 --tensor-parallel 4 --link pcie-4 --model llama-2-70b --dtype bfloat16

    GPU, host, link and model are names of files in configs/, or paths to files of your own. How times are predicted,
    and how far off the predictions are, is in docs/simulator.md. Requests are all of one size, or have the lengths of a
    --workload; with --best-effort-requests there are two classes, the second of one size. At the end stands which of
    the systems to choose, and the `apex serve` line that starts it.
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
    host_memory_gib: float | None = None
    """GiB of host memory, in place of the host's own."""
    host_read_gb_s: float | None = None
    """GB/s at which all cores of the host read its memory, in place of the host's own; `apex doctor` measures it."""
    cpu_hosts: int = 1
    """Equal hosts that compute CPU attention: the GPUs' own, whose memory is used first, and others over a network."""
    network_gbps: float = 100.0
    """Gigabits per second between the GPUs' host and the others, in each direction."""
    model: str = "llama-3.1-8b"
    """Model: a name in configs/models such as qwen2.5-7b, a Hugging Face folder, or a name on its hub; only config.json
    is read."""
    dtype: Dtype = "float16"
    """Weights, activations and KV cache."""
    weights: Weights = "auto"
    """auto: as config.json says; int4: the layers' matrices in 4 bits, by a kernel whose speed is an assumption."""
    weights_gpu_memory: float | Literal["auto"] | None = None
    """GiB of GPU memory for weights; the others are streamed over PCIe or computed by the CPU. auto: as many as give
    the highest predicted throughput. By default all weights, and auto where these do not fit one GPU."""
    cpu_kernel: str = "native"
    """CPU attention kernel: native, ispc or llamafile."""
    cpu_kv_dtype: CpuKVDtype = "auto"
    """K and V in the CPU tier: auto as --dtype; int8, with a scale per token and head, in about half of the bytes."""
    cpu_bandwidth_gb_s: float | None = None
    """GB/s at which CPU attention reads the KV cache; by default the host's, times the kernel's share of it."""
    num_requests: int = 200
    """Requests of each run."""
    input_len: int = 1000
    """Prompt tokens of each, without --workload."""
    output_len: int = 200
    """Output tokens of each, without --workload."""
    num_gpu_blocks: int | None = None
    """KV blocks of the GPU tier; by default what 90% of the GPUs' memory leaves beside the weights."""
    num_cpu_blocks: int | None = None
    """KV blocks of the CPU tier; by default half of the hosts' memory."""
    block_size: int = 16
    """Tokens per KV-cache block, in both tiers."""
    prefix_cache_tiers: CacheTiers = "auto"
    """Tiers where prefixes are cached: see `apex serve`. Without conversations auto is vllm's GPU tier alone."""
    max_num_batched_tokens: int = 2048
    """Tokens in the GPU batch of one iteration at most; longer prompts prefill in chunks."""
    max_num_seqs: int = 1024
    """Requests that hold KV cache at once at most, in both tiers together."""
    seed: int = 0
    """Seed of lengths and arrivals."""
    bound: bool = False
    """Print what no schedule of this machine and these requests can exceed, by a linear program, and what 10% more of
    each resource would bring; takes up to a minute."""
    output: OutputFile = None
    """Write the figures to this JSON file too."""
    traffic: TrafficFlags = field(default_factory=TrafficFlags)
    best_effort: BestEffortFlags = field(default_factory=BestEffortFlags)
    strategy: StrategyFlags = field(default_factory=StrategyFlags)
    timeline: TimelineFlags = field(default_factory=TimelineFlags)

    def run(self) -> int:
        self.check_flags()
        with input_errors(of_engine=False):
            from apex.simulator.predicted_machine import predict_machine
            from swiftllm.kv.tensors import check_kv

            machine = predict_machine(
                self.gpu,
                self.host,
                self.model,
                self.dtype,
                tensor_parallel=self.tensor_parallel,
                link_name=self.link,
                cpu_hosts=self.cpu_hosts,
                network_gbps=self.network_gbps,
                host_memory_gib=self.host_memory_gib,
                host_read_gb_s=self.host_read_gb_s,
                weights=self.weights,
                cpu_kernel=self.cpu_kernel,
                cpu_kv_dtype=self.cpu_kv_dtype,
                cpu_bandwidth_gb_s=self.cpu_bandwidth_gb_s,
                block_size=self.block_size,
                max_tokens=self.max_num_batched_tokens,
                max_num_seqs=self.max_num_seqs,
            )
            asked = {"prefix_cache_tiers": self.prefix_cache_tiers, "num_cpu_blocks": self.num_cpu_blocks}
            check_kv(EngineConfig(self.model, **asked), machine.model)
            strategy = self.traffic.with_targets(self.strategy.config(*self.system))
            loads = self.loads
            runs = [(load, system) for load in loads for system in self.system]
            placed = {(load, system): self._placed(system, machine, loads[load]) for load, system in runs}
            tiers = {(load, system): self._cached_tiers(system, loads[load].are_shared) for load, system in runs}
            blocks = {run: self._blocks(machine, placed[run], tiers[run]) for run in runs}
        self._print_setting(machine, placed, blocks)
        if self.bound:
            self._check_bound(machine, placed, loads)
        records, why_none = [], []
        tokens = [loads[load].total_output_tokens for load, _ in runs]
        remaining = Remaining("simulating", tokens)
        for load, lengths in loads.items():
            requests = self.requests(lengths, self.prompts(lengths, one_token_each))
            for system in self.system:
                with input_errors(of_engine=False):
                    run = load, system
                    engine = self._engine(system, machine, blocks[run], strategy, placed[run], tiers[run])
                    if self.traffic.workload is None:
                        check_requests(engine, [requests[0], requests[-1]])  # those of a class are of one size
                measured, replay = self._measure(engine, requests, machine, strategy, load)
                why_none.append(all_refused_line(system, replay))
                records.append(measured | self._memory(machine, lengths, placed[run], blocks[run]))
                remaining.ended()
        bound = None
        limit = None
        if self.bound:
            if any(record["failed"] for record in records):
                print("--bound: there is none, since some requests were refused, and it counts the tokens of all")
            else:
                limit = self._schedule_bound(machine, blocks, next(iter(loads.values())))
                records = [record | {"schedule_bound_tokens_per_s": limit.tokens_per_s} for record in records]
        elif self.traffic.workload is None and not any(placed.values()) and not self.best_effort_words:
            bound = self._decode_bound(machine, blocks.values())
            records = [record | {"bound_tokens_per_s": bound[0]} for record in records]
        console = stdout_console()
        console.print(f"\n[bold]SIMULATED[/]: {machine.description}", soft_wrap=True)
        console.print(f"{machine.gpu.name} is known from {machine.how_known}", soft_wrap=True, highlight=False)
        if VLLM in self.system:
            console.print(f"{VLLM}: {VLLM_DEFAULTS}", soft_wrap=True, highlight=False)
        outside = sorted({name for record in records for name in record["extrapolated"]})
        remark = f"outside the measured sizes, extrapolated: {', '.join(outside)}" if outside else ""
        self.report(records, "SIMULATED", f"{machine.description}\n{self.request_words}", remark)
        if bound is not None:
            print("bound: {:,.0f} tok/s, decodes alone with GPU and CPU overlapped, {} + {} of them".format(*bound))
        if limit is not None:
            print_limit(limit, records)
        for line in filter(None, why_none):
            print(f"apex: {line}", file=sys.stderr)
        self._advise(machine, records, strategy)
        return 1 if any(why_none) else 0

    def _print_setting(
        self,
        machine: PredictedMachine,
        placed: Mapping[tuple[str, str], PlacedMachine | None],
        blocks: Mapping[tuple[str, str], tuple[int, int]],
    ) -> None:
        """Print the requests and the memory of each run, which is a load and a system."""
        workload = f"{self.request_words}{self.best_effort_words}"
        counts = {
            run: f"{gpu} GPU and {cpu} CPU blocks of {self.block_size} tokens" for run, (gpu, cpu) in blocks.items()
        }
        if not any(placed.values()):
            print(f"{workload}; {next(iter(counts.values()))}")
        else:
            print(workload)
            if line := self._does_not_fit(machine):
                print(line)
            runs: dict[tuple[str, str], list[str]] = {}
            for (load, system), on_machine in placed.items():
                assert on_machine is not None, "weights have their memory"
                timed = on_machine.timed
                where = timed.describe() if self.num_loads == 1 else timed.placement.describe()
                runs.setdefault((system, f"{where}; {counts[load, system]}"), []).append(load)
            for (system, where), of_loads in runs.items():
                print(f"{', '.join([system, *(of_loads if len(of_loads) < self.num_loads else [])])}: {where}")
        if self.traffic.workload is not None:
            origin = self.first_load.origin
            print(f"{self.first_load.title}: {origin.kind}, {origin.note}")
        from apex.simulator.predicted_profile import host_read_gb_s

        if self.host_memory_gib is not None and self.host == Simulate.host and self.host_read_gb_s is None:
            print(
                f"the host is taken as {machine.host.name}, whose {machine.host['cores']:g} cores read "
                f"{host_read_gb_s(machine.host):.0f} GB/s: name yours with --host, or say --host-read-gb-s"
            )

    def _does_not_fit(self, machine: PredictedMachine) -> str:
        """What to know where weights are off the GPU without having been asked for; empty where none is."""
        if self.weights_gpu_memory is not None or not self._is_too_large(machine):
            return ""
        usable = machine.budget(self.block_size).usable_bytes / 1e9
        return (
            f"{machine.model_name} takes {machine.weight_bytes / 1e9:.1f} GB in {machine.dtype}, and "
            f"{machine.gpu.name} may use {usable:.1f} of its {machine.gpu['memory_gb']:g} GB: the rest stays in host "
            "memory, is streamed over PCIe or computed by the CPU, as with --weights-gpu-memory auto"
        )

    def _in_4_bits(self, machine: PredictedMachine) -> str:
        """What a smaller checkpoint would change; empty where the weights fit, or would not fit either."""
        if self._does_not_fit(machine) and (packed := machine.in_4_bits(self.block_size)) is not None:
            return (
                f"A 4-bit checkpoint (AWQ or GPTQ) takes {packed.weight_bytes / 1e9:.1f} GB and leaves room for "
                f"{packed.max_gpu_blocks * self.block_size:,} tokens of KV cache on the GPU: see --weights int4."
            )
        return ""

    def _advise(
        self, machine: PredictedMachine, records: Sequence[Mapping[str, Any]], strategy: StrategyConfig
    ) -> None:
        """Print which system to choose, what binds, and how to start it."""
        choice = choose(records, by_goodput=self.traffic.has_targets)
        if choice is None or self.best_effort_words:
            return
        on_gpu = choice.record["weights_gpu_gib"]
        options = {
            "dtype": self.dtype,
            "weights_gpu_memory": None if on_gpu is None else f"{on_gpu:.2f}",
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_num_seqs": self.max_num_seqs,
            "num_gpu_blocks": self.num_gpu_blocks,
            "num_cpu_blocks": self.num_cpu_blocks,
            "prefix_cache_tiers": None if self.prefix_cache_tiers == "auto" else self.prefix_cache_tiers,
            "block_size": None if self.block_size == EngineConfig.block_size else self.block_size,
            "tensor_parallel": None if self.tensor_parallel == 1 else self.tensor_parallel,
            "cpu_kernel": None if self.cpu_kernel == Simulate.cpu_kernel else self.cpu_kernel,
            "cpu_kv_dtype": None if self.cpu_kv_dtype == "auto" else self.cpu_kv_dtype,
            "attention_hosts": ",".join(f"HOST{i}:7300" for i in range(1, self.cpu_hosts)) or None,
        }
        from apex.simulator.hardware_files import model_origins

        model = model_origins().get(machine.model_name, self.model)
        if self.weights == "int4":
            model = "A-4-BIT-CHECKPOINT-OF-IT"
        print(f"\nSIMULATED: {choice.sentence} {binding(choice.record, records)}")
        if line := self._in_4_bits(machine):
            print(line)
        print(serve_line(model, choice.record, options, strategy))

    def _decode_bound(self, machine: PredictedMachine, blocks: Iterable[tuple[int, int]]) -> tuple[float, int, int]:
        context, most = self.input_len + self.output_len / 2, min(self.max_num_seqs, self.num_requests)
        per_slot = context / LayerGroups.of(machine.model, self.block_size).slots(context)
        tokens = tuple(per_slot * self.block_size * max(of_tier) for of_tier in zip(*blocks, strict=True))
        return decode_bound(machine.table, machine.model.num_layers, context, tokens, most)

    def _check_bound(
        self,
        machine: PredictedMachine,
        placed: Mapping[tuple[str, str], PlacedMachine | None],
        loads: Mapping[str, Lengths],
    ) -> None:
        from apex.simulator.bound import why_no_bound

        with input_errors(of_engine=False):
            reason = why_no_bound(
                weights_off_gpu=any(placed.values()),
                several_hosts=machine.remote_hosts is not None,
                windows=machine.model.windows is not None,
                arrivals=any(row.arrival_s for lengths in loads.values() for row in lengths.rows),
                prefixes=any(lengths.are_shared for lengths in loads.values()),
                is_cut=self.best_effort.duration_s is not None,
                one_token=any(max(out for _, out in self.sizes(lengths)) < 2 for lengths in loads.values()),
            )
            if reason:
                raise ValueError(f"--bound: {reason}")

    def _schedule_bound(
        self, machine: PredictedMachine, blocks: Mapping[tuple[str, str], tuple[int, int]], lengths: Lengths
    ) -> Bound:
        """What no schedule can exceed, with the most blocks that any of the systems has."""
        from apex.simulator.bound import BoundMachine, BoundWorkload, bound

        gpu, cpu = (max(of_tier) * self.block_size for of_tier in zip(*blocks.values(), strict=True))
        found = BoundMachine(
            machine.table,
            machine.model.num_layers,
            gpu,
            cpu,
            self.max_num_batched_tokens,
            self.max_num_seqs,
            has_host_work=VLLM not in self.system,  # its host works beside the GPU
        )
        return bound(found, BoundWorkload.of(self.sizes(lengths)))

    def check_flags(self) -> None:
        super().check_flags()
        of_engine = ("block_size", "max_num_batched_tokens", "max_num_seqs", "tensor_parallel", "num_gpu_blocks",
                     "num_cpu_blocks", "cpu_kv_dtype", "cpu_kernel")  # fmt: skip
        with input_errors(of_engine=False):
            EngineConfig(self.model, **{name: getattr(self, name) for name in of_engine})
            EngineConfig(self.model, weights_gpu_memory=self.weights_gpu_memory)
            if self.link is not None and self.tensor_parallel == 1:
                raise ValueError("--link means nothing without --tensor-parallel")
            if self.network_gbps != Simulate.network_gbps and self.cpu_hosts == 1:
                raise ValueError("--network-gbps means nothing without --cpu-hosts")

    def _placed(self, system: str, machine: PredictedMachine, lengths: Lengths) -> PlacedMachine | None:
        """The machine with a placement of its weights for a system and a load; None where all are on the GPU."""
        memory = self.weights_gpu_memory
        if memory is None and not self._is_too_large(machine):
            return None
        from apex.placement.search import UniformLoad
        from apex.simulator.predicted_machine import WeightPlacer

        # Turns wait for the answers before them.
        most = min(self.max_num_seqs, self.num_requests, sum(row.after is None for row in lengths.rows))
        at_once = UniformLoad(most, lengths.mean_input_tokens, lengths.mean_output_tokens)
        placer, offloads = WeightPlacer(machine, self.block_size), find_system(system).needs_predictions
        given = "auto" if memory is None else memory
        if not (span_s := lengths.span_s):
            return placer.place(given, at_once, offloads=offloads)
        return placer.place_for_rate(given, at_once, lengths.total_output_tokens / span_s, offloads=offloads)

    def _is_too_large(self, machine: PredictedMachine) -> bool:
        """Whether the weights alone exceed the one GPU."""
        return self.tensor_parallel == 1 and machine.budget(self.block_size).max_gpu_blocks == 0

    def _cached_tiers(self, system: str, shares_prompts: bool) -> tuple[Tier, ...]:
        """Where a system caches prefixes."""
        # Where prompts share nothing, a cache would only copy: vLLM has one all the same, others if asked for.
        has_cache = shares_prompts or system == VLLM or self.prefix_cache_tiers != "auto"
        caching = EngineConfig(self.model, enable_prefix_caching=has_cache, prefix_cache_tiers=self.prefix_cache_tiers)
        return find_system(system).caching_tiers(caching)

    def _blocks(
        self, machine: PredictedMachine, placed: PlacedMachine | None, cached_tiers: Collection[Tier]
    ) -> tuple[int, int]:
        """KV blocks of the GPU and the CPU tier, by default beside snapshots of states where a model needs them."""
        given = self.num_gpu_blocks, self.num_cpu_blocks
        gpu, cpu = machine.num_blocks(*given, self.block_size) if placed is None else placed.num_blocks(*given)
        if self.num_cpu_blocks is None and cached_tiers:
            cpu = machine.beside_snapshots(cpu)
        return gpu, cpu

    def _engine(
        self,
        system: str,
        machine: PredictedMachine,
        blocks: tuple[int, int],
        strategy: StrategyConfig,
        placed: PlacedMachine | None,
        cached_tiers: tuple[Tier, ...],
    ) -> Engine:
        off_gpu = {} if placed is None else placed.engine_options
        as_vllm = {"runtime": vllm_runtime(self.max_num_seqs)} if system == VLLM else {}
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
            states=machine.states(blocks[1], self.block_size, caches=bool(cached_tiers)),
            strategy=strategy,
            remote_hosts=machine.remote_hosts,
            vocab_size=VOCABULARY,
            cached_tiers=cached_tiers,
            **as_vllm,
            **off_gpu,
        )

    def _measure(
        self,
        engine: Engine,
        requests: Sequence[ReplayRequest],
        machine: PredictedMachine,
        strategy: StrategyConfig,
        load: str,
    ) -> tuple[dict[str, Any], Replay]:
        backend = engine.backend
        assert isinstance(backend, SimulatedBackend)
        replay = self.replay(engine, requests, machine.description, load, simulated=True, wait=backend.sleep)
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
            **self.load_values(load),
            "cpu_attention_gb_s": float(machine.table.identity["cpu_attention_gb_s"]),
            **self.figures(replay, strategy),
            "extrapolated": sorted(backend.extrapolated),
            "requests_under_way": requests_under_way(replay.records),
        }
        return record, replay

    def _memory(
        self, machine: PredictedMachine, lengths: Lengths, placed: PlacedMachine | None, blocks: tuple[int, int]
    ) -> dict[str, Any]:
        """What a row says of the memory of its system."""
        from swiftllm.model.placement import Place

        stages = machine.model.num_layers + 1
        on_gpu = stages if placed is None else placed.timed.placement.places.count(Place.RESIDENT)
        return {
            "num_gpu_blocks": blocks[0],
            "num_cpu_blocks": blocks[1],
            "gpu_tier_requests": blocks[0] * self.block_size / (lengths.mean_input_tokens + lengths.mean_output_tokens),
            "weights_gpu_gib": None if placed is None else math.ceil(placed.weight_bytes / GIB * 100) / 100,
            "stages": stages,
            "stages_off_gpu": stages - on_gpu,
        }

    @property
    def seed_of_requests(self) -> int:
        return self.seed


def one_token_each(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Texts of these lengths of which no two begin alike. The first is of the simulated outputs' token."""
    return [(i % VOCABULARY,) * size for i, size in enumerate(sizes)]


def print_limit(limit: Bound, records: Sequence[Mapping[str, Any]]) -> None:
    """Print the bound, what of it the systems reach, and what more of each resource would bring."""
    reached = {record["system"]: record["output_tokens_per_s"] for record in records if record["output_tokens_per_s"]}
    parts = ", ".join(f"{system} {rate / limit.tokens_per_s:.0%}" for system, rate in reached.items())
    print(f"\nSIMULATED: no schedule of this machine makes more than {limit.tokens_per_s:,.0f} tok/s of these requests")
    print(f"Of that: {parts}. What binds most is {BINDING[limit.binding]}. The bound would change with")
    for line in limit.lines():
        print(f"    {line}")


BINDING = {
    "GPU": "the GPU's time",
    "CPU": "the time of CPU attention",
    "GPU memory": "the GPU's memory",
    "CPU memory": "the host's memory",
    "link": "the link between GPU and host",
    "requests": "the number of requests",
}
"""Each resource of the bound in a sentence."""


def requests_under_way(records: Sequence[RequestRecord]) -> float | None:
    """Requests that had arrived and not ended, on average over the makespan; None if none was served."""
    span, done = makespan_s(records), [record for record in records if record.completed]
    return sum(record.token_times_s[-1] - record.arrival_s for record in done) / span if span else None


def all_refused_line(system: str, replay: Replay) -> str:
    """Why a system has no figures: every request was refused. Empty if one was not."""
    if not all(record.refused for record in replay.records):
        return ""
    reason = (replay.records[0].failure or "").removeprefix(REFUSED)
    return f"{system} refused every request, the first one because: {reason}"
