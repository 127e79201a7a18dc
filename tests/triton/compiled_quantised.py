"""The kernels for 4-bit weights compiled ahead of time, as :mod:`tests.triton.compiled` does for the others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from triton.runtime import driver

from swiftllm.ops.matrices import QuantisedMatrix
from swiftllm.ops.triton.ops import MOST_QUANTISED_ROWS, QUANTISED_SHARED_BYTES, TritonOps
from tests.triton.compiled import (
    HOST,
    LLAMA_8B,
    NUM_MULTIPROCESSORS,
    SHARED_KIB,
    PretendGPU,
    compiled,
    resource_usage,
)

__all__ = ["compiled"]  # the fixture

QUANTISED_KERNELS = {"combine_splits_kernel", "dequantise_kernel", "quantised_linear_kernel"}
ROWS = (1, 2, 3, 32, 33, MOST_QUANTISED_ROWS + 1)  # each tile, and the matrix written out
# bfloat16 differs in conversions alone.
TARGETS = [
    (75, torch.float16),
    (86, torch.bfloat16),
    pytest.param(90, torch.float16, marks=pytest.mark.thorough),
]


def multiply(ops: TritonOps, out: int, inputs: int, dtype: torch.dtype, has_runs: bool) -> None:
    matrix = QuantisedMatrix.allocate(torch.empty, out, inputs, inputs // 128, 128, dtype, dtype)
    if has_runs:  # as a rank's part of a matrix with act-order has them
        matrix = replace(matrix, order=torch.arange(inputs), runs=torch.zeros(inputs // 16, dtype=torch.int32))
    linear = ops.make_quantised_linear(matrix, torch.zeros(out, dtype=dtype))
    for rows in ROWS:
        linear(torch.zeros(rows, inputs, dtype=dtype))


@pytest.mark.filterwarnings("ignore:Triton has no tensor cores")
@pytest.mark.parametrize("capability, dtype", TARGETS, ids=str)
def test_kernels_fit_their_gpu(compiled, capability, dtype, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(torch, "addmm", lambda bias, x, dense, out: None)  # nothing was written to multiply
    driver.set_active(PretendGPU(capability))
    ops = TritonOps(HOST, capability, NUM_MULTIPROCESSORS)
    multiply(ops, 2 * LLAMA_8B.intermediate_size, LLAMA_8B.hidden_size, dtype, has_runs=dtype is torch.bfloat16)

    names = set()
    for kernel in {kernel.hash: kernel for kernel in compiled}.values():
        name, shared, ptx = kernel.metadata.name, kernel.metadata.shared, kernel.asm["ptx"]
        usage = resource_usage(kernel, tmp_path)
        on_tensor_cores = "mma.sync" in ptx or "wgmma" in ptx
        print(f"sm_{capability} {dtype} {name}: {usage['REG']} registers, {shared} bytes of shared memory")
        assert f".target sm_{capability}" in ptx
        assert shared <= SHARED_KIB[capability] * 1024, name
        assert usage["STACK"] == 0 and usage["LOCAL"] == 0, f"{name} spills: {usage}"
        assert on_tensor_cores == (name == "quantised_linear_kernel" and capability >= 80), name
        if name == "quantised_linear_kernel" and capability < 90:  # where tiles of 64 rows take 61 KiB of 228
            assert shared <= max(QUANTISED_SHARED_BYTES.values()), "fewer programs run at a time than expected"
        names.add(name)
    assert names == QUANTISED_KERNELS
