"""Work on rows, one per token: what a Llama layer does between and in its matrix products, in host memory.

Arrays come in through DLPack. Rows are contiguous and may lie apart; all arrays of a call have one dtype, float32,
float16 or bfloat16, where not said otherwise. Sums run in float32. Every function computes without the GIL on the
caller's thread and on `num_threads - 1` helpers at most; the result does not depend on their number. `num_threads` is
at most 4,096, a size at most 2^28. Where an argument does not fit it raises ValueError, naming the argument, before it
has written anything.
"""

from collections.abc import Sequence
from typing import Any

from pacpu import native

__all__ = [
    "CODE_COLUMNS",
    "Crossing",
    "PackedCodes",
    "PackedExperts",
    "argmax",
    "convolve",
    "delta_rule",
    "gather_blocks",
    "gather_kv",
    "has_prompt_attention",
    "linear",
    "linear_is_fastest",
    "norm_heads",
    "pack_matrix",
    "packed_shape",
    "prompt_attention",
    "rms_norm",
    "rotary",
    "scatter_blocks",
    "silu_and_mul",
    "store_kv",
]


def linear_is_fastest() -> bool:
    """Whether `linear` is the fastest way to multiply bfloat16 matrices on this CPU: with AVX-512 and without AMX."""
    return native.linear_is_fastest()


def packed_shape(out_features: int, in_features: int) -> tuple[int, int, int, int]:
    """Shape of a packed matrix, whose sides are at least 1."""
    return native.packed_shape(out_features, in_features)


def pack_matrix(weight: Any, packed: Any) -> None:
    """Bring a bfloat16 matrix into the layout of `linear`.

    Args:
        weight: bfloat16 `[out_features, in_features]`.
        packed: bfloat16, contiguous, of the shape `packed_shape` tells; overwritten.
    """
    native.pack_matrix(weight, packed)


def linear(x: Any, packed: Any, bias: Any | None, out: Any, *, num_threads: int = 1) -> None:
    """`out = x weight^T + bias`, in bfloat16, summed in float32. Needs AVX-512 (`pacpu.isa()`).

    With AVX-512 BF16 by its dot products, which take subnormal numbers for zero, unless they are slower than
    multiply-adds in float32: that is measured in the first call (10 ms).

    A row of the result is the same, bit by bit, whatever other rows there are.

    Args:
        x: bfloat16 `[rows, in_features]`.
        packed: the weight, see `pack_matrix`.
        bias: bfloat16 `[out_features]`, or None.
        out: bfloat16 `[rows, out_features]`, overwritten.
    """
    native.linear(x, packed, bias, out, num_threads)


CODE_COLUMNS = 8
"""Outputs in a panel of :class:`PackedCodes`."""


class PackedCodes:
    """A matrix of 4-bit codes. An element is `(code - zero) * scale`, rounded to the dtype of the rows. In MXFP4 it is
    the code's number (two bits of exponent, one of mantissa) times `2^(scale - 127)`.

    Outputs are cut into panels of `CODE_COLUMNS`, the last one padded; inputs into blocks of 128, the last one padded,
    and into groups. Runs on every CPU; in bfloat16 by dot products where `linear` computes with them. Keeps its arrays
    alive.
    """

    def __init__(
        self, codes: Any, scales: Any, zeros: Any | None, order: Any | None, *, out_features: int, in_features: int
    ) -> None:
        """All arrays are contiguous.

        Args:
            codes: int32 `[panels, blocks, CODE_COLUMNS, 16]`. Bits 4 j to 4 j + 3 of word i: the code of the block's
                input 16 j + i. Those of padding are arbitrary.
            scales: float32, float16 or bfloat16 `[panels, groups, CODE_COLUMNS]`. A group is a multiple of 16 inputs.
                In MXFP4 uint8, of which 255 is NaN.
            zeros: uint8 `[panels, groups, CODE_COLUMNS]`; None in MXFP4.
            order: int32 `[in_features]`: column i of codes multiplies input `order[i]`. None: input i.
        """
        self.native = native.PackedCodes(codes, scales, zeros, order, out_features, in_features)

    def linear(self, x: Any, bias: Any | None, out: Any, *, num_threads: int = 1) -> None:
        """`out = x matrix^T + bias`, summed in float32. A row is the same, bit by bit, whatever other rows there are.

        Args:
            x: `[rows, in_features]`.
            bias: `[out_features]`, or None.
            out: `[rows, out_features]`, overwritten.
        """
        self.native.linear(x, bias, out, num_threads)

    def write_out(self, out: Any, *, num_threads: int = 1) -> None:
        """Write the elements, columns in the order of codes, to `out`: contiguous `[out_features, in_features]`."""
        self.native.write_out(out, num_threads)


class PackedExperts:
    """An FFN of experts in 4 bits, as one call of several phases: `gate_up`, an activation and `down` of each expert
    with the rows that chose it, then their sums. A row of the result is the same, bit by bit, whatever other rows there
    are. Keeps its arrays alive.
    """

    def __init__(
        self,
        gate_up: tuple[PackedCodes, Any | None],
        down: tuple[PackedCodes, Any | None],
        clamp: tuple[float, float] | None,
        *,
        num_experts: int,
        hidden_size: int,
        ffn_size: int,
    ) -> None:
        """
        Args:
            gate_up: the matrices of all experts `[2 * ffn_size, hidden_size]`, each padded to whole panels, one below
                the other, and the biases `[num_experts * 2 * ffn_size]`, or None. The first half are the gate's.
            down: the same of `[hidden_size, ffn_size]`.
            clamp: `limit` and `alpha` of the activation `(up + 1) * gate * sigmoid(alpha * gate)`, with gate at most
                `limit` and up from `-limit` to `limit`. None: `silu(gate) * up`.
        """
        stacks = [(matrix.native, bias) for matrix, bias in (gate_up, down)]
        self._native = native.PackedExperts(*stacks, clamp, num_experts, hidden_size, ffn_size)

    def __call__(self, x: Any, ids: Any, likelihoods: Any, out: Any, *, num_threads: int = 1) -> None:
        """`out = sum over slots of likelihood * expert(x)`, of products rounded to the dtype, summed in float32.

        Args:
            x: `[rows, hidden_size]`, of the dtype of the biases.
            ids: int64 `[rows, slots]`, contiguous: experts. `num_experts`: none, which adds nothing.
            likelihoods: float32 `[rows, slots]`, contiguous.
            out: `[rows, hidden_size]`, overwritten.
        """
        self._native.run(x, ids, likelihoods, out, num_threads)


class Crossing:
    """A Llama layer from its attention on, and the next layer up to its attention, as one call of several phases.

    `residual += o(attention_out)`, `residual += down(silu_and_mul(gate_up(rms_norm(residual))))`, and
    `out = projection(rms_norm(residual))`, of which the first heads are normed (`norm_heads`) and turned (`rotary`).
    The bits are those of the separate functions. Needs AVX-512, as `linear` does. Keeps its arrays alive.
    """

    def __init__(
        self,
        *,
        o: tuple[Any, Any | None],
        post_norm: Any,
        gate_up: tuple[Any, Any | None],
        down: tuple[Any, Any | None],
        norm: Any,
        projection: tuple[Any, Any | None],
        head_norms: Any | None,
        attention_size: int,
        intermediate_size: int,
        out_features: int,
        rotated_heads: int,
        head_dim: int,
        eps: float,
    ) -> None:
        """Every array is bfloat16.

        Args:
            o, gate_up, down, projection: packed matrix (see `pack_matrix`) or `PackedCodes`, and bias, or None.
            post_norm, norm: weights `[hidden_size]` of the norms before `gate_up` and before `projection`.
            head_norms: `[rotated_heads, head_dim]`, or None.
            attention_size, intermediate_size, out_features: inputs of `o` and of `down`, outputs of `projection`.
            rotated_heads: heads at the front of `out` that are turned; 0: none.
        """
        o, gate_up, down, projection = map(_native_matrix, (o, gate_up, down, projection))
        matrices, sizes = (o, post_norm, gate_up, down, norm, projection), (attention_size, intermediate_size)
        self._native = native.Crossing(*matrices, head_norms, *sizes, out_features, rotated_heads, head_dim, eps)

    def __call__(
        self, attention_out: Any, residual: Any, angles: Any | None, out: Any, *, num_threads: int = 1
    ) -> None:
        """
        Args:
            attention_out: bfloat16 `[rows, attention_size]`.
            residual: bfloat16 `[rows, hidden_size]`; the next layer's afterwards.
            angles: float32 `[rows, 2, head_dim]`, see `rotary`; None if no heads are turned.
            out: bfloat16 `[rows, out_features]`, overwritten.
        """
        self._native.run(attention_out, residual, angles, out, num_threads)


def _native_matrix(parts: tuple[Any, Any | None]) -> tuple[Any, Any | None]:
    matrix, bias = parts
    return (matrix.native if isinstance(matrix, PackedCodes) else matrix), bias


def has_prompt_attention() -> bool:
    """Whether `prompt_attention` runs on this CPU: with AVX-512 BF16, unless that is slower than float32."""
    return native.has_prompt_attention()


def prompt_attention(
    prompts: Sequence[tuple[Any, Any, Any, Any]],
    scale: float,
    *,
    window: int | None = None,
    sinks: Any | None = None,
    num_threads: int = 1,
) -> None:
    """Attention of each request's last tokens over its whole context, in bfloat16: no token attends to a later one.

    Scores and sums are float32; the softmax's weights are rounded to bfloat16, and subnormal numbers are zero. The
    result for a request does not depend on the others.

    Args:
        prompts: for each request `q, k, v, out`.
            q: bfloat16 `[rows, num_heads, head_dim]`; head_dim is even.
            k, v: bfloat16 `[num_kv_heads, context, head_dim]`, contiguous within a token; the rows are the last tokens.
            out: bfloat16 `[rows, num_heads, head_dim]`, overwritten.
        scale, window, sinks: as in `pacpu.paged_attention`.
    """
    native.prompt_attention(prompts, scale, window, sinks, num_threads)


def rms_norm(
    x: Any,
    weight: Any,
    eps: float,
    out: Any,
    *,
    addend: Any | None = None,
    offset: float = 0.0,
    num_threads: int = 1,
) -> None:
    """`out = x / sqrt(mean(x^2) + eps) * (offset + weight)` over the last dimension; with an addend `x += addend`
    before.

    Args:
        x: `[rows, size]`; overwritten if there is an addend.
        weight: `[size]`.
        out: `[rows, size]`, overwritten.
        addend: `[rows, size]`, or None.
    """
    native.rms_norm(x, weight, eps, out, addend, offset, num_threads)


def norm_heads(x: Any, weights: Any, eps: float, *, offset: float = 0.0, num_threads: int = 1) -> None:
    """`rms_norm` of each head in place, with a weight of its own.

    Args:
        x: `[rows, heads, head_dim]`.
        weights: `[heads, head_dim]`.
    """
    native.norm_heads(x, weights, eps, offset, num_threads)


def rotary(x: Any, angles: Any, *, num_threads: int = 1) -> None:
    """Turn `x` in place: `x * cos + x_exchanged * sin`, where the halves of each head have changed places.

    Args:
        x: `[rows, heads, head_dim]`; head_dim is even.
        angles: float32 `[rows, 2, head_dim]`: cosines, and sines with the sign of their place.
    """
    native.rotary(x, angles, num_threads)


def silu_and_mul(x: Any, out: Any, *, num_threads: int = 1) -> None:
    """`out = silu(x[:, :size]) * x[:, size:]`.

    Args:
        x: `[rows, 2 size]`.
        out: `[rows, size]`, overwritten.
    """
    native.silu_and_mul(x, out, num_threads)


def argmax(x: Any, out: Any, *, num_threads: int = 1) -> None:
    """The column of each row's highest value, the first of equals. NaN counts as the highest value.

    Args:
        x: `[rows, size]`; size is at least 1.
        out: int64 `[rows]`, overwritten.
    """
    native.argmax(x, out, num_threads)


def convolve(
    x: Any,
    weight: Any,
    inputs: Any,
    chunks: Sequence[tuple[int, int, bool]],
    decode_slots: Any,
    out: Any,
    *,
    num_threads: int = 1,
) -> None:
    """`out = silu(sum of weight[:, i] * input i)`: the inputs are the request's last rows, of which the row itself is
    the last.

    Rows are those of chunks, one behind the other, then one a decode.

    Args:
        x: `[rows, channels]`.
        weight: `[channels, width]`, contiguous; width is from 2 to 8.
        inputs: `[slots, channels, width - 1]`, contiguous: the last inputs of each request; updated.
        chunks: slot, rows and whether the slot counts as zero, of each. Slot -1 is that of padding: it counts as zero,
            and is not written.
        decode_slots: int64 `[decodes]`. No two of them and of the chunks have the same slot, but -1.
        out: `[rows, channels]`, overwritten.
    """
    native.convolve(x, weight, inputs, chunks, decode_slots, out, num_threads)


def delta_rule(
    q: Any,
    k: Any,
    v: Any,
    log_decay: Any,
    beta: Any,
    states: Any,
    chunks: Sequence[tuple[int, int, bool]],
    decode_slots: Any,
    out: Any,
    *,
    num_threads: int = 1,
) -> None:
    """The gated delta rule, in float32: of each head the state becomes `exp(log_decay) * state + key^T written`, where
    `written = beta * (value - exp(log_decay) * key state)`, and `out = query state`.

    Keys are scaled to length 1, queries to `1 / sqrt(key_dim)`. As many value heads follow each other for each key
    head. A decode reads its state from memory once, and writes it once.

    Args:
        q, k: `[rows, num_key_heads, key_dim]`.
        v: `[rows, num_value_heads, value_dim]`.
        log_decay, beta: float32 `[rows, num_value_heads]`.
        states: float32 `[slots, num_value_heads, key_dim, value_dim]`, contiguous; updated.
        chunks, decode_slots: as in `convolve`.
        out: float32 `[rows, num_value_heads, value_dim]`, overwritten.
    """
    native.delta_rule(q, k, v, log_decay, beta, states, chunks, decode_slots, out, num_threads)


def store_kv(k: Any, v: Any, kv_cache: Any, blocks: Any, offsets: Any, *, num_threads: int = 1) -> None:
    """Write row i of k and v to slot `offsets[i]` of block `blocks[i]`.

    Args:
        k, v: `[rows, num_kv_heads, head_dim]`.
        kv_cache: `[num_blocks, num_kv_heads, 2, block_size, head_dim]`, contiguous; or an int8 cache
            (`pacpu.int8`), for which rows become codes.
        blocks, offsets: int64 `[rows]`. No two rows have the same slot.
    """
    native.store_kv(k, v, kv_cache, blocks, offsets, num_threads)


def gather_kv(kv_cache: Any, blocks: Any, out: Any, *, num_threads: int = 1) -> None:
    """Copy K and V of a request's first tokens out of its blocks; bits are kept.

    Args:
        kv_cache: `[num_blocks, num_kv_heads, 2, block_size, head_dim]`, contiguous; or an int8 cache
            (`pacpu.int8`), whose codes become elements of the dtype that `out` has.
        blocks: int64 `[blocks]`, the request's in order; those beyond the tokens are not read.
        out: `[2, num_kv_heads, tokens, head_dim]`, contiguous; overwritten.
    """
    native.gather_kv(kv_cache, blocks, out, num_threads)


def gather_blocks(pool: Any, blocks: Any, staging: Any, *, num_threads: int = 1) -> None:
    """Copy whole blocks of all layers into a buffer; bits are kept.

    Codes become elements if the pool is int8 (`pacpu.int8`), `[num_layers, num_blocks, num_kv_heads, head_bytes]`, and
    staging is not: `[num_layers, blocks, num_kv_heads, 2, block_size, head_dim]` of any dtype.

    Args:
        pool: `[num_layers, num_blocks, ...]`, contiguous.
        blocks: int64 `[blocks]`.
        staging: `[num_layers, blocks, ...]`, contiguous; overwritten.
    """
    native.gather_blocks(pool, blocks, staging, num_threads)


def scatter_blocks(staging: Any, pool: Any, blocks: Any, *, num_threads: int = 1) -> None:
    """The reverse of `gather_blocks`: the blocks, all different, are overwritten, those of an int8 pool with codes."""
    native.scatter_blocks(staging, pool, blocks, num_threads)
