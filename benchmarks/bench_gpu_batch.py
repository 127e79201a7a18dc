"""Measures the parts of a GPU batch's step on a CPU, and compares each with torch and with the machine's limits.

Every part runs through all layers, as in a step, so that weights come from memory as in a real run. Our operations and
torch's alternate within a round. Figures are medians over rounds of CPU time, which equals real time on a core without
other work. The lower bound of a part is the longer of two times: streaming its weights (for attention: K and V) from
memory once, and its multiply-adds in float32 at the rate of a product that stays in the cache.

OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/bench_gpu_batch.py [--help]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

if __name__ == "__main__" and not __package__:  # run as a file
    import here

import torch
from rich.console import Console
from rich.table import Table

from apex.cli.options import parse_options
from evaluation.results.paths import default_model
from swiftllm.model.config import ModelConfig
from swiftllm.model.rope import rotary_table
from swiftllm.model.weights import LayerWeights, LlamaWeights, dummy_weights
from swiftllm.ops.cpu import CpuOps
from swiftllm.ops.interface import Linear, Ops
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


def main(options: Options) -> None:
    """Measure and print the table."""
    torch.set_num_threads(1)
    element = getattr(torch, options.dtype)
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
