"""Paged decode attention on the CPU.

A C++ extension without dependencies: arrays come in through DLPack (torch tensors, numpy arrays), compute happens
without the GIL on the caller's thread and a pool of helpers. Several kernels stand behind one call; see
`pacpu/include/kernel.h` for what a kernel is.

The instruction set is chosen when the package is imported: the best that the CPU has, or the one named by the
environment variable PACPU_ISA (portable, avx2, avx512, avx512bf16 or amx). Importing fails with ImportError if it
cannot be used here. Where the extension is not built (`is_built` is false) the first call fails with ImportError.
"""

from importlib.util import find_spec
from typing import Any

__all__ = [
    "HEADS",
    "PREFETCHES",
    "default_kernel",
    "is_built",
    "isa",
    "kernels",
    "paged_attention",
    "prefetch",
    "prefetches",
    "read_bandwidth",
    "rows_per_read",
    "set_prefetch",
    "set_shared_row_cost",
    "shared_row_cost",
    "unavailable",
    "unavailable_isas",
    "zero",
]


class NotBuilt:
    """Fails at the first use and not at import: block tables, schedulers and the simulator use no native code."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(
            "the CPU kernels are not built: `python setup.py build_ext --inplace` builds them, and needs g++",
            name="pacpu",
        )


is_built = find_spec("pacpu._pacpu") is not None
if is_built:
    import pacpu._pacpu as native
else:
    native: Any = NotBuilt()

PREFETCHES = ("none", "L2", "L1")
"""What the native kernel asks memory for ahead of time: the beginning of each block only, or all of it, into the second
or the first level of the cache."""
HEADS = ("MHA", "GQA")
"""Whether each KV head has a query head of its own, or several query heads share one."""


def paged_attention(
    q: Any,
    k: Any,
    v: Any,
    kv_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    out: Any,
    scale: float,
    *,
    window: int | None = None,
    sinks: Any | None = None,
    num_threads: int = 1,
    kernel: str | None = None,
) -> None:
    """Store each request's new token in the KV cache and attend to its context, or a window of it, in one layer.

    `out[i, h] = sum_t softmax_t(scale * <q[i, h], K_t>) V_t` over the `seq_lens[i]` tokens of request i, accumulated
    in float32. All of q, k, v, kv_cache and out have one dtype: float32, float16 or bfloat16. kv_cache may be int8
    instead (`pacpu.int8`), for which the native kernel multiplies integers. Every array is in host memory. kv_cache and
    seq_lens are contiguous; rows of the others are contiguous but may lie apart, so q, k and v can be slices of a fused
    QKV matrix. No array has a dimension above 2^28, and no context has more tokens.

    Args:
        q: `[batch, num_heads, head_dim]`, queries of the new tokens; head_dim is a multiple of 8. A row
            has at most 2^18 elements.
        k: `[batch, num_kv_heads, head_dim]`, keys of the new tokens; num_kv_heads divides num_heads.
        v: `[batch, num_kv_heads, head_dim]`, values of the new tokens.
        kv_cache: `[num_blocks, num_kv_heads, 2, block_size, head_dim]`, written at position `seq_lens[i] - 1` of each
            request; index 0 of the third dimension holds K, index 1 holds V. Or uint8 `[num_blocks, num_kv_heads,
            head_bytes]`: new tokens become codes when they are stored.
        block_tables: int32 `[batch, max_blocks_per_seq]`, ids of each request's blocks; only the first
            `ceil(seq_lens[i] / block_size)` are looked at, and of these only what the window reaches.
        seq_lens: int32 `[batch]`, context length in tokens, including the new one.
        out: `[batch, num_heads, head_dim]`, overwritten.
        scale: factor on the scores, usually `head_dim ** -0.5`.
        window: how many tokens a request attends to, the last ones, the new one included; None: all.
        sinks: float32 `[num_heads]`, or None: each the score of one more token of that head, whose value is zero.
        num_threads: threads to use at most, from 1 to 4,096, the caller's included; any number gives the same result up
            to rounding, and the same number the same bits.
        kernel: one of `kernels(dtype)`; None means `default_kernel(dtype)`.

    Raises:
        ValueError: an argument does not fit the above; nothing has been written. The message names the argument and
            the offending value.
    """
    native.paged_attention(q, k, v, kv_cache, block_tables, seq_lens, out, scale, window, sinks, num_threads, kernel)


def read_bandwidth(array: Any, *, num_threads: int = 1) -> float:
    """Bytes per second at which so many threads read an array, in the faster of two patterns; each is tried once.

    Each thread reads a share, and the time of the slowest counts, while it has its core: other work lowers it little.

    One pass of a measurement: `swiftllm.runtime.cpu_tuning` makes of several the limit that a kernel's speed is held
    against. The array should be much larger than the last-level cache.

    Args:
        array: contiguous, in host memory, of any dtype.
        num_threads: threads to use at most, from 1 to 4,096, the caller's included.

    Raises:
        ValueError: an argument does not fit the above.
    """
    return native.read_bandwidth(array, num_threads)


def zero(array: Any, *, num_threads: int = 1) -> None:
    """Write zeros into an array, in pieces of 2 MiB that the threads take in turn.

    Memory that is written for the first time gets its pages then, each on the NUMA node of the thread that writes it:
    the pages of a large array lie on the nodes of all threads.

    Args:
        array: contiguous, in host memory, of any dtype; overwritten.
        num_threads: threads to use at most, from 1 to 4,096, the caller's included.

    Raises:
        ValueError: an argument does not fit the above; nothing has been written.
    """
    native.zero(array, num_threads)


def kernels(dtype: Any = None) -> list[str]:
    """Names of the kernels that can be used here, the default first; with a dtype, of those that compute in it.

    Raises:
        ValueError: `dtype` is not float32, float16 or bfloat16.
    """
    return native.kernels(None if dtype is None else _name(dtype))


def unavailable() -> dict[str, str]:
    """The kernels that were not built or cannot run on this CPU, and why."""
    return native.unavailable()


def default_kernel(dtype: Any) -> str:
    """The kernel used for a dtype (a name such as "float16", or a torch or numpy dtype) when the caller names none.

    Raises:
        ValueError: no kernel computes in this dtype.
    """
    return native.default_kernel(_name(dtype))


def isa() -> str:
    """The instruction set in use: "portable", "avx2", "avx512", "avx512bf16" or "amx"."""
    return native.isa()


def prefetches(dtype: Any, heads: str) -> tuple[str, ...]:
    """What :func:`set_prefetch` takes for such calls: `PREFETCHES`, and for int8 MHA "L2 AVX2" and "L1 AVX2".

    With these, codes are multiplied as AVX2 does it, where there is VNNI, too: prefetches are further apart then, which
    some processors need. Results differ by rounding.

    Args:
        dtype, heads: which calls, as in :func:`prefetch`.

    Raises:
        ValueError: an argument is none of those.
    """
    return tuple(native.prefetches(_name(dtype), heads))


def prefetch(dtype: Any, heads: str) -> str:
    """Which of :func:`prefetches` calls use with the instruction set in use: "L1" until :func:`set_prefetch` is called.

    Args:
        dtype: of the KV cache, as in :func:`default_kernel`, or "int8".
        heads: one of `HEADS`.

    Raises:
        ValueError: an argument is none of the above.
    """
    return native.prefetch(_name(dtype), heads)


def set_prefetch(dtype: Any, heads: str, way: str) -> None:
    """Choose one of :func:`prefetches` for all later calls of this process with the instruction set in use.

    One of `PREFETCHES` changes the speed, not the result. Not for use during a call.

    Args:
        dtype, heads: which calls, as in :func:`prefetch`.
        way: one of those that there are for such calls.

    Raises:
        ValueError: an argument is none of the above.
    """
    native.set_prefetch(_name(dtype), heads, way)


def shared_row_cost(dtype: Any, heads: str) -> float:
    """What one more row costs in a block that rows share, in parts of a row's own block: 1.0, where calls share none,
    until :func:`set_shared_row_cost` says otherwise.

    Args:
        dtype, heads: which calls, as in :func:`prefetch`.

    Raises:
        ValueError: an argument is none of the above.
    """
    return native.shared_row_cost(_name(dtype), heads)


def rows_per_read(num_heads: int, num_kv_heads: int) -> int:
    """How many rows at most are attended with one read of the blocks that they share.

    Raises:
        ValueError: num_kv_heads does not divide num_heads, or one of them is below 1 or above 2^28.
    """
    return native.rows_per_read(num_heads, num_kv_heads)


def set_shared_row_cost(dtype: Any, heads: str, cost: float) -> None:
    """Have all later calls of this process with the instruction set in use read shared blocks once, where that pays.

    Rows share the full blocks with which their block tables begin alike. The cost decides how many blocks must be
    shared by how many rows, and how the work is divided between threads. Results differ by rounding. Not for use during
    a call.

    Args:
        dtype, heads: which calls, as in :func:`prefetch`.
        cost: as in :func:`shared_row_cost`, above 0 and at most 1; rounded to eighths. With 1.0 no blocks are shared.

    Raises:
        ValueError: an argument is none of the above.
    """
    native.set_shared_row_cost(_name(dtype), heads, cost)


def unavailable_isas() -> dict[str, str]:
    """The instruction sets that cannot be used here, and why.

    AMX is among them, too, where the operating system refuses it or where it fails a comparison with AVX-512.
    """
    return native.unavailable_isas()


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
