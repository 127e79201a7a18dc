"""Measures a layer of 4-bit experts on the CPU beside dense products of 4-bit matrices with as many rows.

Each expert multiplies the same number of rows, and both kinds read as many bytes, from memory. Both alternate within a
round. Figures are medians over rounds of CPU time, which equals real time on a core without other work.

OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/bench_experts.py [--help]
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Literal

if __name__ == "__main__" and not __package__:  # run as a file
    import here

import torch
from rich.console import Console
from rich.table import Table

from apex.cli.options import parse_options
from benchmarks.bench_gpu_batch import timed
from swiftllm.ops.cpu import CpuOps
from swiftllm.ops.matrices import MXFP4_GROUP, ClampedSwiGLU, ExpertWeights, QuantisedMatrix
from swiftllm.runtime.cpu_tuning import read_limit

ROWS = (1, 2, 4, 8, 16, 32)
DENSE_OUT, DENSE_IN = 11008, 4096


@dataclass(frozen=True)
class Options:
    """Measure a layer of 4-bit experts on a CPU, beside dense products of 4-bit matrices with as many rows."""

    num_experts: int = 64
    """Experts of the layer, all of which are chosen."""
    per_token: int = 8
    """Experts of a row."""
    hidden_size: int = 2048
    """Inputs of an expert."""
    ffn_size: int = 768
    """Size of an expert's FFN."""
    kind: Literal["int4", "mxfp4"] = "int4"
    """Integers in groups of 128, or MXFP4 with biases, as gpt-oss has them."""
    rounds: int = 7
    """Number of rounds, over which medians are taken."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Data type of rows."""


def random_matrix(options: Options, out_features: int, in_features: int) -> QuantisedMatrix:
    group_size = MXFP4_GROUP if options.kind == "mxfp4" else 128
    kinds = getattr(torch, options.dtype), torch.uint8 if options.kind == "mxfp4" else torch.float16
    sizes = out_features, in_features, in_features // group_size, group_size
    matrix = QuantisedMatrix.allocate(torch.empty, *sizes, *kinds)
    matrix.codes.random_(-(1 << 31), (1 << 31) - 1)
    matrix.scales.fill_(120 if options.kind == "mxfp4" else 0.01)
    if matrix.zeros is not None:
        matrix.zeros.random_(16)
    return matrix


def random_experts(options: Options) -> ExpertWeights:
    experts, hidden, ffn = options.num_experts, options.hidden_size, options.ffn_size
    stacks = random_matrix(options, experts * 2 * ffn, hidden), random_matrix(options, experts * hidden, ffn)
    router = torch.zeros(experts, hidden, dtype=stacks[0].dtype)
    if options.kind == "int4":
        return ExpertWeights(router, *stacks, options.per_token, normalises=True)
    biases = (torch.zeros(stack.out_features, dtype=stack.dtype) for stack in stacks)
    more = torch.zeros(experts), *biases, ClampedSwiGLU(7.0)
    return ExpertWeights(router, *stacks, options.per_token, True, *more)


def main(options: Options) -> None:
    """Measure and print the table."""
    torch.set_num_threads(1)
    ops, dtype = CpuOps(), getattr(torch, options.dtype)
    weights = random_experts(options)
    num_bytes = weights.gate_up.nbytes + weights.down.nbytes
    dense = [random_matrix(options, DENSE_OUT, DENSE_IN)]
    dense += [random_matrix(options, DENSE_OUT, DENSE_IN) for _ in range(round(num_bytes / dense[0].nbytes) - 1)]
    dense_bytes = sum(matrix.nbytes for matrix in dense)
    linears, experts = [ops.make_quantised_linear(matrix, None) for matrix in dense], ops.make_experts(weights)
    dense.clear()
    read_rate = read_limit(1)
    print(
        f"{options.num_experts} experts of {options.hidden_size} x {options.ffn_size}, {options.kind}, "
        f"{options.dtype} ({num_bytes / 1e6:.0f} MB), beside {len(linears)} matrices of {DENSE_OUT} x {DENSE_IN} "
        f"({dense_bytes / 1e6:.0f} MB); one core reads {read_rate / 1e9:.1f} GB/s"
    )
    table = Table("rows of each", "dense GB/s", "experts GB/s", "ratio", "of streaming reads")
    with torch.inference_mode():
        for rows in ROWS:
            count = rows * options.num_experts // options.per_token
            x, dense_x = (
                torch.randn(n, size).to(dtype) for n, size in ((count, options.hidden_size), (rows, DENSE_IN))
            )
            slots = torch.arange(count * options.per_token).view(count, -1)
            routing = slots % options.num_experts, torch.full(slots.shape, 1 / options.per_token)
            taken: tuple[list[float], list[float]] = ([], [])
            for _ in range(options.rounds + 1):  # the first one warms up
                taken[0].append(timed(lambda x=dense_x: [linear(x) for linear in linears]))
                taken[1].append(timed(lambda x=x, routing=routing: experts.compute(x, *routing)))
            dense_rate, rate = (
                size / statistics.median(seconds[1:])
                for size, seconds in zip((dense_bytes, num_bytes), taken, strict=True)
            )
            cells = (
                f"{dense_rate / 1e9:.1f}",
                f"{rate / 1e9:.1f}",
                f"{rate / dense_rate:.2f}",
                f"{rate / read_rate:.0%}",
            )
            table.add_row(str(rows), *cells)
    Console().print(table)


if __name__ == "__main__":
    main(parse_options(Options, prog="benchmarks/bench_experts.py"))
