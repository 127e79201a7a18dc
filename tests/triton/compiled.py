"""Every Triton kernel compiled ahead of time, for GPUs that are not here, exactly as the engine would launch it.

The operations run on host tensors with Triton told that a GPU of the target's kind is there. Each launch compiles
what it would launch, with the very tile sizes, warps and specialisations, and is left out.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from pacpu import int8
from swiftllm.ops.interface import ContextBlocks, StateChunk, StateRows
from swiftllm.ops.triton import attention as triton_attention
from swiftllm.ops.triton import kv_cache as triton_cache
from swiftllm.ops.triton import kv_cache as triton_int8
from swiftllm.ops.triton import linear_attention as triton_linear_attention
from swiftllm.ops.triton import rows as triton_draws
from swiftllm.ops.triton import rows as triton_rows
from swiftllm.ops.triton.ops import DOT_SHARED_BYTES, LANES_SHARED_BYTES, TritonOps

# Most that one program may have, in KiB (compute capabilities in the CUDA programming guide).
SHARED_KIB = {75: 64, 86: 99, 90: 227}
# T4, A10 and H100: another GPU's kernels are those of one of these, and its limits are no tighter.
TARGETS = [
    (75, torch.float16),
    (86, torch.bfloat16),
    *(
        pytest.param(*target, marks=pytest.mark.thorough)
        for target in ((75, torch.float32), (86, torch.float16), (90, torch.bfloat16))
    ),
]
# What the number of programs that run at once is derived from.
EXPECTED_SHARED_BYTES = {
    "decode_partials_dot_kernel": DOT_SHARED_BYTES,
    "decode_partials_lanes_kernel": LANES_SHARED_BYTES,
}
HOST = torch.device("cpu")
NUM_MULTIPROCESSORS = 72


@dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int


VOCAB = 128_256
LLAMA_8B = Shape(32, 8, 128, 4096, 14336)
SMOLLM2 = Shape(9, 3, 64, 576, 1536)
# The other sizes of groups go through attention alone; 7B: Llama-2-7B, 70B: one of eight shards of Llama-3-70B.
LLAMA_7B = Shape(32, 32, 128, 4096, 11008)
LLAMA_70B_SHARD = Shape(8, 1, 128, 8192, 3584)
GPT_OSS_20B = Shape(64, 8, 64, 2880, 2880)
QWEN3_5_27B = 16, 48, 128, 128, 4  # key heads, value heads, their dims, width of the convolution


@dataclass(frozen=True)
class PretendGPU:
    """What Triton asks a driver for before it compiles; a device number of its own keeps the targets' caches apart."""

    capability: int

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list]:
    """The kernels that were compiled instead of launched."""
    kernels: list = []
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        assert all(0 < size <= limit for size, limit in zip(grid, (2**31 - 1, 65535, 65535), strict=False)), grid
        kernels.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    monkeypatch.setattr(JITFunction, "run", compile_only)
    yield kernels
    driver.set_active(None)


def decode(
    ops: TritonOps,
    shape: Shape,
    dtype: torch.dtype,
    rows: int = 3,
    blocks: int = 70,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """With a context of ``blocks``: of several splits by default."""
    heads, kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    q, k, v = torch.empty(rows, heads + 2 * kv_heads, head_dim, dtype=dtype).split((heads, kv_heads, kv_heads), 1)
    lens = torch.ones(rows, dtype=torch.int32)
    layer = torch.empty(4, kv_heads, 2, 16, head_dim, dtype=dtype)
    tables = torch.zeros(rows, blocks, dtype=torch.int32)
    out = torch.empty_like(q.contiguous())
    ops.decode_attention(q, k, v, layer, tables, lens, out, head_dim**-0.5, window, sinks)


def everything(ops: TritonOps, shape: Shape, dtype: torch.dtype, rows: int = 3) -> None:
    heads, kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    hidden, weight = torch.empty(rows, shape.hidden_size, dtype=dtype), torch.empty(shape.hidden_size, dtype=dtype)
    ops.embed(torch.arange(rows), hidden)
    ops.rms_norm(hidden, weight, 1e-5)
    ops.add_rms_norm_(hidden, hidden, weight, 1e-5)
    if dtype is torch.float16:  # with a checkpoint in bfloat16
        ops.rms_norm(hidden.float(), weight, 1e-5)
        ops.add_rms_norm_(hidden.float(), hidden, weight, 1e-5)
    ops.silu_and_mul(torch.empty(rows, 2 * shape.intermediate_size, dtype=dtype))
    qkv = torch.empty(rows, heads + 2 * kv_heads, head_dim, dtype=dtype)
    ops.norm_heads_(qkv[:, : heads + kv_heads], torch.empty(heads + kv_heads, head_dim, dtype=dtype), 1e-5)
    ops.rotary_(qkv[:, : heads + kv_heads], torch.empty(rows, 2, head_dim))
    pool, slots = torch.empty(2, 4, kv_heads, 2, 16, head_dim, dtype=dtype), torch.arange(rows)
    ops.store_kv(*qkv.split((heads, kv_heads, kv_heads), 1)[1:], pool[0], slots, slots)
    ops.gather_contexts(pool[0], ContextBlocks.of([[0, 1], [2]], [17, 3], 16, lambda ids: ids))
    staging = torch.empty_like(pool[:, :rows])
    ops.gather_blocks(pool, slots, staging)
    ops.scatter_blocks(staging, pool, slots)
    codes = torch.empty(2, rows, kv_heads, int8.head_bytes(16, head_dim), dtype=torch.uint8)
    ops.quantise_blocks(pool, slots, codes)
    ops.dequantise_blocks(codes, pool, slots)
    settings = torch.empty(3, rows, dtype=torch.float64)
    ops.draw(torch.empty(rows, VOCAB, dtype=dtype), slots, slots, settings)
    decode(ops, shape, dtype)
    decode(ops, shape, dtype, blocks=7)


def continue_states(ops: TritonOps, dtype: torch.dtype) -> None:
    """Linear attention of two chunks and a decode, as a model's projections hand it rows."""
    key_heads, heads, key_dim, value_dim, width = QWEN3_5_27B
    keys, values = key_heads * key_dim, heads * value_dim
    channels = 2 * keys + values
    rows = StateRows.of([StateChunk(1, 40, False), StateChunk(0, 3, True)], [2], lambda tensor: tensor)
    qkv, gate = torch.empty(44, channels + values, dtype=dtype).split((channels, values), 1)
    inputs = torch.empty(3, channels, width - 1, dtype=dtype)
    qkv = ops.convolve(qkv, torch.empty(channels, width, dtype=dtype), inputs, rows)
    of_heads = ((key_heads, key_dim), (key_heads, key_dim), (heads, value_dim))
    q, k, v = (x.unflatten(1, shape) for x, shape in zip(qkv.split((keys, keys, values), 1), of_heads, strict=True))
    log_decay, beta = torch.empty(2, 44, heads)
    out = ops.delta_rule(q, k, v, log_decay, beta, torch.empty(3, heads, key_dim, value_dim), rows)
    ops.norm_and_gate(out, torch.empty(value_dim, dtype=dtype), gate.unflatten(1, out.shape[1:]), 1e-6)


def resource_usage(kernel: triton.compiler.CompiledKernel, folder: Path) -> dict[str, int]:
    """Registers, stack and local memory per thread, as the assembler left them."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", output)}


@pytest.mark.parametrize("capability, dtype", TARGETS, ids=str)
def test_kernels_fit_their_gpu(compiled, capability, dtype, tmp_path):
    driver.set_active(PretendGPU(capability))
    ops = TritonOps(HOST, capability, NUM_MULTIPROCESSORS)
    everything(ops, LLAMA_8B, dtype)
    if (capability, dtype) in ((75, torch.float16), (86, torch.bfloat16)):
        everything(ops, SMOLLM2, dtype)
    for shape in (SMOLLM2, LLAMA_7B, LLAMA_70B_SHARD):
        decode(ops, shape, dtype)
    for window in (None, 128):
        decode(ops, GPT_OSS_20B, dtype, window=window, sinks=torch.empty(64))
    continue_states(ops, dtype)

    names = set()
    for kernel in {kernel.hash: kernel for kernel in compiled}.values():
        name, shared = kernel.metadata.name, kernel.metadata.shared
        usage = resource_usage(kernel, tmp_path)
        uses_dot, ptx = "tt.dot" in kernel.asm["ttir"], kernel.asm["ptx"]
        on_tensor_cores = "mma.sync" in ptx or "wgmma" in ptx
        print(f"sm_{capability} {dtype} {name}: {usage['REG']} registers, {shared} bytes of shared memory")
        assert f".target sm_{capability}" in ptx
        assert shared <= SHARED_KIB[capability] * 1024, name
        assert usage["STACK"] == 0 and usage["LOCAL"] == 0, f"{name} spills: {usage}"
        assert on_tensor_cores == uses_dot, f"{name}: tl.dot {uses_dot}, tensor-core instructions {on_tensor_cores}"
        assert shared <= EXPECTED_SHARED_BYTES.get(name, shared), f"{name} takes more: fewer run at a time"
        assert "quantise_blocks" not in name or "fma.rn" not in ptx, f"{name} has not the bits of pacpu"
        names.add(name)

    of_other_targets = {"decode_partials_lanes_kernel", "decode_partials_dot_kernel"} - names
    assert len(of_other_targets) == 1 and names | of_other_targets == all_kernels()


def all_kernels() -> set[str]:
    modules = (
        triton_attention, triton_cache, triton_draws, triton_int8, triton_linear_attention, triton_rows,
    )  # fmt: skip
    return {name for module in modules for name in vars(module) if name.endswith("_kernel")}
