"""Measures the parts of a GPU batch's step on a CPU, and compares each with torch and with the machine's limits.

Every part runs through all layers, as in a step, so that weights come from memory as in a real run. Our operations and
torch's alternate within a round. Figures are medians over rounds of CPU time, which equals real time on a core without
other work. The lower bound of a part is the longer of two times: streaming its weights (for attention: K and V) from
memory once, and its multiply-adds in float32 at the rate of a product that stays in the cache.

With --experts it measures 4-bit experts in host memory instead: their products beside those of dense 4-bit matrices,
decodes whose experts the CPU computes beside decodes whose experts are copied first, and the number of rows above which
copying is better.

With --linear-attention it measures the operations of linear attention instead, with every instruction set of this CPU,
beside those of torch and beside a copy of as many bytes as the states have.

OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/bench_gpu_batch.py [--help]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Literal

if __name__ == "__main__" and not __package__:  # run as a file
    import here

import torch
from rich.console import Console
from rich.table import Table

from apex.cli.options import parse_options
from apex.perf.model import Curve
from apex.placement.measured import with_powers_of_two
from apex.placement.search import MOST_ROWS, most_cpu_rows
from apex.simulator.hardware_files import load_model_config
from apex.simulator.predicted_machine import INT4
from benchmarks.pacpu_cases import Contender, usable_isas
from evaluation.results.paths import default_model
from swiftllm.device import HostDevice
from swiftllm.model.config import LinearSizes, ModelConfig
from swiftllm.model.llama import LinearStates, LlamaModel
from swiftllm.model.placement import Place, Placement
from swiftllm.model.rope import rotary_table
from swiftllm.model.stages import HostExperts, LoadedWeights, host_memory
from swiftllm.model.weights import LayerWeights, LlamaWeights, dummy_weights
from swiftllm.ops.cpu import CodedExperts, CpuOps
from swiftllm.ops.interface import Linear, Ops, StateChunk, StateRows
from swiftllm.ops.matrices import ExpertWeights, QuantisedMatrix
from swiftllm.runtime.cpu_tuning import read_limit

BLOCK_SIZE = 16


@dataclass
class StepPart:
    """A part of the step. ``run`` runs it for all layers; ``flops`` and ``weight_bytes`` are totals of that."""

    run: Callable[[], object]
    flops: int = 0
    weight_bytes: int = 0


@dataclass(frozen=True)
class DecodeGpuBatch:
    """``num_rows`` decodes with ``context_len`` tokens each, through a model with dummy weights."""

    config: ModelConfig
    weights: LlamaWeights
    dtype: torch.dtype
    num_rows: int
    context_len: int

    def parts(self, ops: Ops) -> dict[str, StepPart]:
        matrices = {name: self._linear(ops, name) for name in ("qkv", "o", "gate_up", "down")}
        return {
            **matrices,
            "norms": self._norms(ops),
            "rotary": self._rotary(ops),
            "SiLU": self._silu(ops),
            "attention": self._attention(ops),
            "logits": self._product(ops, [self.weights.lm_head]),
        }

    def _rows(self, *shape: int) -> torch.Tensor:
        return torch.randn(self.num_rows, *shape).to(self.dtype)

    def _linear(self, ops: Ops, name: str) -> StepPart:
        return self._product(ops, [getattr(layer, name) for layer in self.weights.layers])

    def _product(self, ops: Ops, matrices: list[torch.Tensor]) -> StepPart:
        linears: list[Linear] = [ops.make_linear(matrix, None) for matrix in matrices]
        x, size = self._rows(matrices[0].shape[1]), sum(matrix.numel() for matrix in matrices)

        def run() -> None:
            for linear in linears:
                linear(x)

        return StepPart(run, 2 * self.num_rows * size, size * self.dtype.itemsize)

    def _norms(self, ops: Ops) -> StepPart:
        addend, residual, eps = self._rows(self.config.hidden_size), self._rows(self.config.hidden_size), 1e-5
        return self._each_layer(
            lambda layer: (
                ops.add_rms_norm_(residual, addend, layer.input_norm, eps),
                ops.add_rms_norm_(residual, addend, layer.post_norm, eps),
            )
        )

    def _rotary(self, ops: Ops) -> StepPart:
        config = self.config
        x = self._rows(config.num_heads + config.num_kv_heads, config.head_dim)
        angles = rotary_table(self.context_len, config.head_dim, config.rope_theta, config.rope_scaling)
        angles = angles[-1:].expand(self.num_rows, -1, -1).contiguous()
        return self._each_layer(lambda layer: ops.rotary_(x, angles))

    def _silu(self, ops: Ops) -> StepPart:
        x = self._rows(2 * self.config.intermediate_size)
        return self._each_layer(lambda layer: ops.silu_and_mul(x))

    def _attention(self, ops: Ops) -> StepPart:
        config, blocks = self.config, -(-self.context_len // BLOCK_SIZE)
        shape = (self.num_rows * blocks, config.num_kv_heads, 2, BLOCK_SIZE, config.head_dim)
        caches = [torch.randn(shape).to(self.dtype) for _ in self.weights.layers]
        tables = torch.randperm(self.num_rows * blocks).int().view(self.num_rows, blocks)
        lens = torch.full((self.num_rows,), self.context_len, dtype=torch.int32)
        q, out = (self._rows(config.num_heads, config.head_dim) for _ in range(2))
        k, v = (self._rows(config.num_kv_heads, config.head_dim) for _ in range(2))

        def run() -> None:
            for cache in caches:
                ops.decode_attention(q, k, v, cache, tables, lens, out, config.head_dim**-0.5)

        return StepPart(run, weight_bytes=len(caches) * caches[0].numel() * self.dtype.itemsize)

    def _each_layer(self, do: Callable[[LayerWeights], object]) -> StepPart:
        def run() -> None:
            for layer in self.weights.layers:
                do(layer)

        return StepPart(run)


def multiply_add_rate() -> float:
    """FLOP/s of a float32 product that fits the level-2 cache: the core's peak rate of multiply-adds."""
    a, b = torch.randn(192, 192), torch.randn(192, 192)
    out = torch.empty(192, 192)
    return 2 * 192**3 / min(timed(lambda: torch.mm(a, b, out=out)) for _ in range(200))


def timed(run: Callable[[], object]) -> float:
    start_s = time.thread_time()
    run()
    return time.thread_time() - start_s


# -- experts in host memory --------------------------------------------------------------------------------------------

EXPERT_MODEL = "qwen3-30b-a3b"
EXPERT_ROWS = (1, 2, 4, 8, 16)
STREAMS = (1, 16)
LAYERS = 4  # of which two lie between others: more bytes than caches hold
MEASURED_ROWS = 128
"""Up to so many rows the number is searched above which experts are copied."""


@torch.inference_mode()
def expert_products(config: ModelConfig, dtype: torch.dtype, rounds: int, threads: int) -> Table:
    """GB/s of codes, scales and zero points: of the experts of a layer with some rows each, and of two dense matrices
    of as many elements with as many rows."""
    assert config.experts is not None
    experts, slots = config.experts.num_experts, config.experts.per_token
    layer = dummy_weights(replace(config, num_layers=1), "cpu", dtype).layers[0]
    gate_up, down = layer.gate_up, layer.down
    assert layer.router is not None and isinstance(gate_up, QuantisedMatrix) and isinstance(down, QuantisedMatrix)
    stacks = gate_up, down
    ops = CpuOps(num_threads=threads)
    layer_of_experts = CodedExperts(ops, ExpertWeights(layer.router, *stacks, slots, normalises=True))
    dense = [(ops.make_quantised_linear(stack, None), stack.in_features) for stack in stacks]
    num_bytes = sum(stack.nbytes for stack in stacks)
    table = Table("rows", "experts GB/s", "dense GB/s", "ratio")
    for count in EXPERT_ROWS:
        rows = count * experts // slots  # so that each expert has so many
        ids = (torch.arange(rows * slots) % experts).view(rows, slots)
        x, likelihoods = torch.randn(rows, config.hidden_size).to(dtype), torch.full((rows, slots), 1 / slots)
        inputs = [torch.randn(count, size).to(dtype) for _, size in dense]
        work = (
            lambda x=x, ids=ids, likelihoods=likelihoods: layer_of_experts.compute(x, ids, likelihoods),
            lambda inputs=inputs: [linear(x) for (linear, _), x in zip(dense, inputs, strict=True)],
        )
        seconds = _interleaved(work, rounds, threads)
        rates = [num_bytes / statistics.median(taken) / 1e9 for taken in seconds]
        ratio = statistics.median(of_dense / of_experts for of_experts, of_dense in zip(*seconds, strict=True))
        table.add_row(str(count), *(f"{rate:.1f}" for rate in rates), f"{ratio:.2f}")
    return table


def _stages_of_experts(config: ModelConfig, dtype: torch.dtype, threads: int) -> tuple[LlamaModel, HostExperts]:
    """A model of a few layers with the experts of its stages in host memory; the CPU computes them of all rows."""
    ops, device = CpuOps(num_threads=threads), HostDevice()
    places = (Place.RESIDENT, *[Place.EXPERTS] * (LAYERS - 1), Place.RESIDENT)
    placement = Placement(places, most_cpu_rows=MOST_ROWS)
    config = replace(config, num_layers=LAYERS)
    tensors = dummy_weights(config, "cpu", dtype, on_host=host_memory(placement, device))
    weights = LoadedWeights(config, tensors, ops, placement, device, ops)
    assert weights.host_experts is not None
    return LlamaModel(config, weights, ops, max_model_len=16), weights.host_experts


def _crossing(model: LlamaModel, dtype: torch.dtype, count: int) -> Callable[[], None]:
    """Random rows through all stages."""
    config = model.config
    attended = torch.randn(count, config.num_heads, config.head_dim).to(dtype)
    residual = torch.randn(count, config.hidden_size).to(dtype)
    rotary_rows = model.rotary_table[torch.zeros(count, dtype=torch.int64)]

    def compute() -> None:
        for stage in range(LAYERS - 1):
            model.stage(stage, attended, residual.clone(), rotary_rows)

    return compute


def _copies(host_experts: HostExperts) -> None:
    for stage in range(LAYERS - 1):
        host_experts.slots.enter(stage)


@torch.inference_mode()
def expert_streams(config: ModelConfig, dtype: torch.dtype, rounds: int, threads: int) -> Table:
    """Decodes through stages with their experts in host memory. The CPU stands for the GPU, too.

    Copied experts take the longer of copy and computation, as where these overlap.
    """
    model, host_experts = _stages_of_experts(config, dtype, threads)
    table = Table("streams", "computed, tokens/s", "copied, tokens/s", "ratio")
    for count in STREAMS:
        work = _crossing(model, dtype, count), partial(_copies, host_experts)
        computed, copies = _interleaved(work, rounds, threads)
        copied = [max(pair) for pair in zip(computed, copies, strict=True)]
        rates = [count * (LAYERS - 1) / config.num_layers / statistics.median(taken) for taken in (computed, copied)]
        ratio = statistics.median(slow / fast for slow, fast in zip(copied, computed, strict=True))
        table.add_row(str(count), *(f"{rate:.1f}" for rate in rates), f"{ratio:.2f}")
    return table


# -- linear attention --------------------------------------------------------------------------------------------------

LINEAR_SIZES = LinearSizes(
    layers_before=3, num_key_heads=16, num_value_heads=48, key_dim=128, value_dim=128, conv_width=4
)
"""Of Qwen3.5-27B."""
LINEAR_DECODES = 16
PROMPT_ROWS = 256
LINEAR_LAYERS = 6  # of 50 MB of states each


@torch.inference_mode()
def linear_attention(dtype: torch.dtype, rounds: int, threads: int) -> Table:
    """Milliseconds of a layer's operations for decodes and for a prompt, and GB/s of states, which a decode reads and
    writes. The copy, by torch, reads and writes as many bytes."""
    sizes, generator = LINEAR_SIZES, torch.Generator().manual_seed(0)
    states = LinearStates(
        torch.rand(LINEAR_LAYERS, LINEAR_DECODES, sizes.num_value_heads, sizes.key_dim, sizes.value_dim),
        torch.randn(LINEAR_LAYERS, LINEAR_DECODES, sizes.conv_channels, sizes.conv_width - 1).to(dtype),
    )
    copied, weight = torch.rand_like(states.recurrent[0]), torch.randn(sizes.conv_channels, sizes.conv_width).to(dtype)
    no_decodes, moved = torch.empty(0, dtype=torch.int64), 2 * states.recurrent[0].nbytes
    decodes = StateRows((), torch.randperm(LINEAR_DECODES, generator=generator))
    prompt = StateRows((StateChunk(0, PROMPT_ROWS, True),), no_decodes)
    turns = cycle(range(LINEAR_LAYERS))  # the layers' states are larger than caches

    def delta_rule(ops: Ops, rows: int, where: StateRows) -> Callable[[], object]:
        q, k = (torch.randn(rows, sizes.num_key_heads, sizes.key_dim).to(dtype) for _ in range(2))
        v = torch.randn(rows, sizes.num_value_heads, sizes.value_dim).to(dtype)
        of_rows = -torch.rand(rows, sizes.num_value_heads), torch.rand(rows, sizes.num_value_heads)
        return lambda: ops.delta_rule(q, k, v, *of_rows, states.recurrent[next(turns)], where)

    def convolve(ops: Ops, rows: int, where: StateRows) -> Callable[[], object]:
        x = torch.randn(rows, sizes.conv_channels).to(dtype)
        return lambda: ops.convolve(x, weight, states.conv[next(turns)], where)

    def by(isa: str, work: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            with Contender("", isa, lambda *_: None).selected():
                work()

        return run

    table = Table("operation", "rows", "by", "ms", "GB/s", "of a copy's", "times torch's")
    for name, make in (("delta rule", delta_rule), ("convolution", convolve)):
        for rows, where in ((LINEAR_DECODES, decodes), (PROMPT_ROWS, prompt)):
            moves_states = name == "delta rule" and where is decodes
            ours = make(CpuOps(num_threads=threads), rows, where)
            work = {"torch": make(Ops(), rows, where), **{isa: by(isa, ours) for isa in usable_isas()}}
            if moves_states:
                work["copy"] = lambda: states.recurrent[next(turns)].copy_(copied)
            seconds = dict(zip(work, _interleaved(list(work.values()), rounds, threads), strict=True))
            for who, taken in seconds.items():
                median_s, rates = statistics.median(taken), ("", "")
                if moves_states:
                    rates = f"{moved / median_s / 1e9:.1f}", f"{_median_ratio(seconds['copy'], taken):.2f}"
                of_torch = _median_ratio(seconds["torch"], taken)
                table.add_row(name, str(rows), who, f"{1e3 * median_s:.2f}", *rates, f"{of_torch:.1f}")
    return table


def _median_ratio(values: Sequence[float], references: Sequence[float]) -> float:
    return statistics.median(value / reference for value, reference in zip(values, references, strict=True))


@torch.inference_mode()
def rows_on_cpu(config: ModelConfig, dtype: torch.dtype, rounds: int, threads: int) -> Table:
    """Up to how many rows the CPU should compute experts, as an engine finds it: from a few measured numbers of rows.

    Then other numbers are measured, those next to the limit among them: what the limit chooses over what is better. A
    GPU is taken to compute copied experts while those of the next stage arrive.
    """
    model, host_experts = _stages_of_experts(config, dtype, threads)

    def measure(sizes: Sequence[int]) -> tuple[list[float], float]:
        """Median seconds with so many rows, and of the copies."""
        work = *(_crossing(model, dtype, count) for count in sizes), partial(_copies, host_experts)
        *computed, copied = map(statistics.median, _interleaved(work, rounds, threads))
        return computed, copied

    sizes = with_powers_of_two((1, MEASURED_ROWS))
    computed, copied_s = measure(sizes)
    limit = most_cpu_rows(Curve(tuple(sizes), tuple(computed)), lambda _: copied_s)
    table = Table("rows", "computed, ms", "copied, ms", f"chosen (CPU up to {limit})", "over the better")
    others = sorted({limit // 2, int(0.8 * limit), limit, limit + 1, int(1.25 * limit), 2 * limit})
    computed, copied_s = measure(others)
    for count, computed_s in zip(others, computed, strict=True):
        chosen, chosen_s = ("computed", computed_s) if count <= limit else ("copied", copied_s)
        over = f"{chosen_s / min(computed_s, copied_s) - 1:.0%}"
        table.add_row(str(count), f"{1e3 * computed_s:.0f}", f"{1e3 * copied_s:.0f}", chosen, over)
    return table


def _interleaved(work: Sequence[Callable[[], object]], rounds: int, threads: int) -> list[list[float]]:
    """Seconds of each, round by round; the first round warms up. CPU time of one thread, elapsed time of several."""
    seconds: list[list[float]] = [[] for _ in work]
    for _ in range(rounds + 1):
        for run, taken in zip(work, seconds, strict=True):
            start_s = time.perf_counter()
            cpu_s = timed(run)
            taken.append(cpu_s if threads == 1 else time.perf_counter() - start_s)
    return [taken[1:] for taken in seconds]


@dataclass(frozen=True)
class Options:
    """Measure every part of a GPU batch on the CPU's decode iteration, and compare it with its lower bound and with
    torch."""

    model: Path | None = None
    """Folder with a config.json (weights are random); by default SmolLM2-135M-Instruct from the cache."""
    num_rows: int = 64
    """Number of decodes in the GPU batch."""
    context_len: int = 192
    """Context tokens of each decode."""
    rounds: int = 7
    """Number of rounds, over which medians are taken."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Data type of weights, activations and KV cache."""
    experts: bool = False
    """Measure 4-bit experts of the sizes of Qwen3-30B-A3B in host memory instead."""
    linear_attention: bool = False
    """Measure linear attention of the sizes of Qwen3.5-27B instead."""
    threads: int = 1
    """Threads with --experts and --linear-attention."""


def main(options: Options) -> None:
    """Measure and print the table."""
    torch.set_num_threads(1)
    element = getattr(torch, options.dtype)
    if options.linear_attention:
        torch.set_num_threads(options.threads)
        print(f"linear attention of Qwen3.5-27B, {options.dtype}, threads: {options.threads}")
        Console().print(linear_attention(element, options.rounds, options.threads))
        return
    if options.experts:
        sizes = replace(load_model_config(EXPERT_MODEL), quantisation=INT4, vocab_size=64)
        how = f"{options.dtype}, threads: {options.threads}; one core reads {read_limit(1) / 1e9:.1f} GB/s"
        print(f"experts of {EXPERT_MODEL} in 4 bits, {how}")
        for measure in (expert_products, expert_streams, rows_on_cpu):
            Console().print(measure(sizes, element, options.rounds, options.threads))
        return
    config = ModelConfig.from_folder(options.model or default_model())
    weights = dummy_weights(config, "cpu", element)
    gpu_batch = DecodeGpuBatch(config, weights, element, options.num_rows, options.context_len)
    ours, torchs = (gpu_batch.parts(ops) for ops in (CpuOps(), Ops()))
    seconds: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ours}
    compute_rates = []
    with torch.inference_mode():
        for _ in range(options.rounds + 1):  # the first one warms up
            compute_rates.append(multiply_add_rate())
            for name in ours:
                for part, taken in zip((ours[name], torchs[name]), seconds[name], strict=True):
                    taken.append(timed(part.run))
    read_rate, compute_rate = read_limit(1), statistics.median(compute_rates[1:])

    print(f"{options.num_rows} decodes of {options.context_len} tokens, {options.dtype}")
    print(f"one core reads {read_rate / 1e9:.1f} GB/s and computes {compute_rate / 1e9:.0f} GFLOP/s in float32")
    table = Table("part", "ms", "share", "torch ms", "bound ms", "GFLOP/s")
    medians = {name: [statistics.median(taken[1:]) for taken in both] for name, both in seconds.items()}
    totals = [sum(column) for column in zip(*medians.values(), strict=True)]
    for name, (mine, torch_s) in medians.items():
        part = ours[name]
        bound_s = max(part.weight_bytes / read_rate, part.flops / compute_rate)
        rates = f"{part.flops / mine / 1e9:.0f}" if part.flops else ""
        cells = (f"{1e3 * mine:.2f}", f"{mine / totals[0]:.0%}", f"{1e3 * torch_s:.2f}", f"{1e3 * bound_s:.2f}", rates)
        table.add_row(name, *cells)
    table.add_row("all", f"{1e3 * totals[0]:.1f}", "", f"{1e3 * totals[1]:.1f}", "", "")
    Console().print(table)


if __name__ == "__main__":
    main(parse_options(Options, prog="benchmarks/bench_gpu_batch.py"))
