"""Measures products of the GPU batch on the CPU with 4-bit matrices beside those with the same matrices dequantised.

Several matrices are multiplied one after the other, so that weights come from memory. Both kinds alternate within a
round. Figures are medians over rounds of CPU time, which equals real time on a core without other work.

OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/bench_codes.py [--help]
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
from swiftllm.ops.interface import Linear
from swiftllm.ops.matrices import QuantisedMatrix
from swiftllm.runtime.cpu_tuning import read_limit

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)


@dataclass(frozen=True)
class Options:
    """Measure products with 4-bit matrices on a CPU, beside those with the same matrices dequantised."""

    out_features: int = 11008
    """Outputs of a matrix."""
    in_features: int = 4096
    """Inputs of a matrix."""
    group_size: int = 128
    """Inputs that share a scale and a zero point."""
    num_matrices: int = 6
    """Number of matrices."""
    rounds: int = 5
    """Number of rounds, over which medians are taken."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Data type of rows and of dequantised weights."""


def random_matrix(options: Options) -> QuantisedMatrix:
    shape = options.in_features // options.group_size, options.out_features
    codes = torch.randint(16, (options.in_features, options.out_features), dtype=torch.uint8)
    zeros, scales = torch.randint(16, shape, dtype=torch.uint8), torch.full(shape, 0.01, dtype=torch.float16)
    return QuantisedMatrix.from_codes(codes, scales, zeros, options.group_size, getattr(torch, options.dtype))


def multiply_all(linears: list[Linear], x: torch.Tensor) -> None:
    for linear in linears:
        linear(x)


def main(options: Options) -> None:
    """Measure and print the table."""
    torch.set_num_threads(1)
    ops = CpuOps()
    matrices = [random_matrix(options) for _ in range(options.num_matrices)]
    coded = [ops.make_quantised_linear(matrix, None) for matrix in matrices]
    full = [ops.make_linear(matrix.dequantise(), None) for matrix in matrices]
    num_bytes = sum(matrix.nbytes for matrix in matrices)
    read_rate = read_limit(1)
    print(f"{options.num_matrices} matrices of {options.out_features} x {options.in_features}, {options.dtype}")
    bits = 8 * num_bytes / options.num_matrices / options.out_features / options.in_features
    print(f"{bits:.2f} bits an element, groups of {options.group_size}; one core reads {read_rate / 1e9:.1f} GB/s")
    table = Table("rows", f"{options.dtype} ms", "4 bits ms", "ratio", "GB/s of 4 bits", "of streaming reads")
    with torch.inference_mode():
        for rows in ROWS:
            x = torch.randn(rows, options.in_features).to(getattr(torch, options.dtype))
            taken: tuple[list[float], list[float]] = ([], [])
            for _ in range(options.rounds + 1):  # the first one warms up
                for linears, seconds in zip((full, coded), taken, strict=True):
                    seconds.append(timed(lambda linears=linears, x=x: multiply_all(linears, x)))
            full_s, coded_s = (statistics.median(seconds[1:]) for seconds in taken)
            rate = num_bytes / coded_s
            cells = f"{1e3 * full_s:.1f}", f"{1e3 * coded_s:.1f}", f"{full_s / coded_s:.2f}", f"{rate / 1e9:.1f}"
            table.add_row(str(rows), *cells, f"{rate / read_rate:.0%}")
    Console().print(table)


if __name__ == "__main__":
    main(parse_options(Options, prog="benchmarks/bench_codes.py"))
