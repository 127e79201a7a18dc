"""The kernels of experts compiled ahead of time, as :mod:`tests.triton.compiled` does for the others."""

from __future__ import annotations

import pytest
import torch
from triton.runtime import driver

from swiftllm.ops.matrices import ClampedSwiGLU, ExpertWeights, QuantisedMatrix
from swiftllm.ops.triton import matrices as triton_experts
from swiftllm.ops.triton.ops import TritonOps
from tests.triton.compiled import HOST, NUM_MULTIPROCESSORS, SHARED_KIB, PretendGPU, compiled, resource_usage
from tests.triton.compiled_quantised import QUANTISED_KERNELS

__all__ = ["compiled"]  # the fixture

QWEN3 = 128, 8, 2048, 768  # experts, slots, hidden, ffn of Qwen3-30B-A3B
GPT_OSS = 32, 4, 2880, 2880
BIASES = "gate_up_bias", "down_bias"
PRODUCTS = ("expert_product_kernel", "expert_codes_kernel")
T4, A10 = (75, torch.float16), (86, torch.bfloat16)
# With rows of the smallest tile and of the largest.
CASES = [
    (*T4, 16),
    (*A10, 2048),
    *(pytest.param(*case, marks=pytest.mark.thorough) for case in ((*T4, 2048), (*A10, 16))),
]


@pytest.mark.parametrize("capability, dtype, rows", CASES, ids=str)
def test_kernels_fit_their_gpu(compiled, capability, dtype, rows, tmp_path) -> None:
    driver.set_active(PretendGPU(capability))
    ops = TritonOps(HOST, capability, NUM_MULTIPROCESSORS)
    for kind, (experts, slots, hidden, ffn) in (("16", QWEN3), ("4", QWEN3), ("mxfp4", GPT_OSS)):
        shapes, more = ((experts * 2 * ffn, hidden), (experts * hidden, ffn)), {}
        stacks = [torch.empty(shape, dtype=dtype) for shape in shapes]
        if kind == "4":
            stacks = [QuantisedMatrix.allocate(torch.empty, out, n, n // 128, 128, dtype, dtype) for out, n in shapes]
        elif kind == "mxfp4":
            more = {name: torch.empty(out, dtype=dtype) for name, (out, _) in zip(BIASES, shapes, strict=True)}
            more["activation"] = ClampedSwiGLU(7.0)
            sizes = [(out, n, n // 32, 32, dtype, torch.uint8) for out, n in shapes]
            stacks = [QuantisedMatrix.allocate(torch.empty, *size) for size in sizes]
        layer = ops.make_experts(ExpertWeights(torch.zeros(experts, hidden), *stacks, slots, True, **more))
        layer(torch.empty(rows, hidden, dtype=dtype), num_rows=torch.zeros(1, dtype=torch.int32))

    names = set()
    for kernel in {kernel.hash: kernel for kernel in compiled}.values():
        name, shared, ptx = kernel.metadata.name, kernel.metadata.shared, kernel.asm["ptx"]
        usage = resource_usage(kernel, tmp_path)
        print(f"sm_{capability} {dtype} {name}: {usage['REG']} registers, {shared} bytes of shared memory")
        on_tensor_cores = "mma.sync" in ptx or "wgmma" in ptx
        assert f".target sm_{capability}" in ptx and "atom" not in ptx
        assert shared <= SHARED_KIB[capability] * 1024, name
        assert usage["STACK"] == 0 and usage["LOCAL"] == 0, f"{name} spills: {usage}"
        assert on_tensor_cores == (name in PRODUCTS and capability >= 80), name
        names.add(name)
    others = {name for name in vars(triton_experts) if name.endswith("_kernel")} - QUANTISED_KERNELS
    assert names - {"silu_and_mul_kernel"} == others
