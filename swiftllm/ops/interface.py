"""The operations between the GEMMs: what each does, and all of them in plain torch.

Faster operations of CPU and GPU are subclasses, and are tested against these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F

from pacpu import int8
from swiftllm.ops.matrices import ClampedSwiGLU, ExpertByExpert, Experts, ExpertWeights, QuantisedMatrix

# -- what all draws of tokens have in common ---------------------------------------------------------------------------
# What all draws of tokens have in common, in torch and in Triton: their weights, and the numbers of an attempt.

# The weights of 2**18 tokens sum to at most 2**52, and float64 holds every integer up to 2**53. A token 2**34 times
# less likely than the likeliest has weight zero and is never drawn.
WEIGHT_BITS = 34
WEIGHT_OF_THE_LIKELIEST = 2.0**WEIGHT_BITS
LEAST_EXPONENT = -40.0  # weights are zero from -34 ln 2 on

UNIFORM_BITS = 53  # of a uniform number in [0, 1): float64 holds them all
# SplitMix64 (Steele, Lea and Flood, 2014): numbers in a row become independent ones.
STEP, FIRST_FACTOR, SECOND_FACTOR = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
BITS_64 = (1 << 64) - 1


def uniform_of(first: float, attempt: int) -> float:
    """The uniform number in [0, 1) of an attempt at a token, from that of the first one, which is attempt 0."""
    if attempt == 0:
        return first
    bits = (int(first * 2.0**UNIFORM_BITS) + attempt * STEP) & BITS_64
    bits = (bits ^ (bits >> 30)) * FIRST_FACTOR & BITS_64
    bits = (bits ^ (bits >> 27)) * SECOND_FACTOR & BITS_64
    return ((bits ^ (bits >> 31)) >> (64 - UNIFORM_BITS)) / 2.0**UNIFORM_BITS


# -- int8 codes of KV blocks -------------------------------------------------------------------------------------------
# int8 codes of whole KV blocks, by torch: the slow twin of pacpu's and Triton's; :mod:`pacpu.int8` has the layout.

TILE = int8.TILE_TOKENS


def codes_and_scales(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int8 ``[..., head_dim]`` and scales float32 ``[...]`` of rows."""
    largest = x.float().abs().amax(-1)
    scales = torch.clamp(largest * torch.tensor(1 / 127, dtype=torch.float32), min=2.0**-23)
    scales = ((scales.view(torch.int32) + 0x80) & ~0xFF).view(torch.float32)
    scales = torch.where(largest.isfinite(), scales, torch.nan)
    codes = (x.float() * (1 / scales)[..., None]).round()
    return torch.where(scales.isfinite()[..., None], codes, 0).to(torch.int8), scales


def pack(blocks: torch.Tensor) -> torch.Tensor:
    """Blocks ``[..., 2, block_size, head_dim]`` as uint8 ``[..., head_bytes]``."""
    codes, scales = codes_and_scales(blocks)
    *outer, _, block_size, head_dim = codes.shape
    tiles = block_size // TILE
    keys, values = codes.unbind(-3)
    keys = (keys.int() + 128).to(torch.uint8).view(*outer, tiles, TILE, head_dim // 4, 4).transpose(-3, -2)
    values = values.reshape(*outer, tiles, 4, 4, head_dim).transpose(-2, -1).contiguous().view(torch.uint8)
    scales = scales.view(*outer, 2, tiles, TILE).transpose(-3, -2).contiguous().view(torch.uint8)
    parts = [part.reshape(*outer, tiles, -1) for part in (keys, values, scales)]
    return torch.cat(parts, -1).view(*outer, int8.head_bytes(block_size, head_dim))


def unpack(blocks: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The reverse of :func:`pack`, in float32."""
    *outer, _ = blocks.shape
    tiles = blocks.view(*outer, -1, int8.tile_bytes(head_dim))
    keys, values, scales = tiles.split([TILE * head_dim, TILE * head_dim, 8 * TILE], -1)
    keys = keys.reshape(*tiles.shape[:-1], head_dim // 4, TILE, 4).transpose(-3, -2).flatten(-2).float() - 128
    values = values.contiguous().view(torch.int8).view(*tiles.shape[:-1], 4, head_dim, 4).transpose(-2, -1)
    values = values.flatten(-3, -2).float()
    scales = scales.contiguous().view(torch.float32).view(*tiles.shape[:-1], 2, TILE, 1)
    both = torch.stack([keys, values], -3) * scales  # [..., tiles, 2, 16, head_dim]
    return both.transpose(-4, -3).flatten(-3, -2)


# -- operations --------------------------------------------------------------------------------------------------------

Linear = Callable[..., torch.Tensor]
"""From ``x [rows, in]`` to ``[rows, out]``. Where graphs are captured, it also accepts ``out=``."""
Crossing = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""See :meth:`Ops.make_crossing`."""
Draw = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""See :meth:`Ops.make_draw`."""

LEAST_WINDOWED_ROWS = 512  # of a piece of a chunk with a window: fewer rows would be many calls
MASK_ELEMENTS_AT_ONCE = 1 << 22  # of rows and tokens; up to 13 bytes each


@dataclass(frozen=True)
class CrossingParts:
    """The work between two attentions, part by part. Linears are of :meth:`Ops.make_linear`."""

    o: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    norm: torch.Tensor
    projection: Linear
    head_norms: torch.Tensor | None
    rotated_heads: int
    """Heads of the projection that are normed and rotated, from the first on; 0 for the vocabulary's."""
    head_dim: int
    eps: float
    """Of all norms, those of heads included."""


@dataclass(frozen=True)
class ChunkLens:
    """The sizes of chunks that follow each other. A chunk is the end of its context, and attention is causal."""

    rows: tuple[int, ...]
    """Of each chunk."""
    tokens: tuple[int, ...]
    """Of each chunk's context, its own rows included: at least those that the rows attend to."""
    row_starts: torch.Tensor
    """int32 ``[chunks + 1]``, on the device: where each chunk's rows begin, and where the last one's end."""
    token_starts: torch.Tensor
    """The same for tokens."""

    @classmethod
    def of(cls, rows: Sequence[int], tokens: Sequence[int], send: Callable[[torch.Tensor], torch.Tensor]) -> ChunkLens:
        """``send`` brings a tensor to the device."""
        starts = send(torch.tensor([[*accumulate(sizes, initial=0)] for sizes in (rows, tokens)], dtype=torch.int32))
        row_starts, token_starts = starts
        return cls(tuple(rows), tuple(tokens), row_starts, token_starts)

    def slices(self) -> Iterator[tuple[slice, slice]]:
        """The rows and the tokens of each chunk."""
        row, token = 0, 0
        for rows, tokens in zip(self.rows, self.tokens, strict=True):
            yield slice(row, row + rows), slice(token, token + tokens)
            row, token = row + rows, token + tokens


@dataclass(frozen=True)
class ContextBlocks:
    """Where a pool has several contexts, each from the beginning of a block on."""

    blocks: torch.Tensor
    """int64 ``[blocks]``, on the pool's device: of all contexts, in order."""
    columns: torch.Tensor
    """int64 ``[blocks]``, on the pool's device: which of all tokens is a block's first one."""
    tokens: tuple[int, ...]
    """Of each context."""

    @classmethod
    def of(
        cls,
        blocks: Sequence[Sequence[int]],
        tokens: Sequence[int],
        block_size: int,
        send: Callable[[torch.Tensor], torch.Tensor],
    ) -> ContextBlocks:
        """``blocks`` and ``tokens`` of each context; ``send`` brings a tensor to the pool's device."""
        columns = []
        for first, count in zip(accumulate(tokens, initial=0), tokens, strict=False):
            columns += range(first, first + count, block_size)
        flat, odd = [block for of_one in blocks for block in of_one], [0] * (len(columns) % 2)
        both = send(torch.tensor([flat + odd, columns + odd]))  # aligned to 16 bytes: Triton compiles others apart
        flat_blocks, first_tokens = both[:, : len(flat)]
        return cls(flat_blocks, first_tokens, tuple(tokens))

    def slices(self, block_size: int) -> Iterator[tuple[slice, slice]]:
        """The blocks and the tokens of each context."""
        block, token = 0, 0
        for tokens in self.tokens:
            blocks = -(-tokens // block_size)
            yield slice(block, block + blocks), slice(token, token + tokens)
            block, token = block + blocks, token + tokens


class StateChunk(NamedTuple):
    """Rows of one request that follow each other, and the slot of its state. ``is_first``: the slot counts as zero."""

    slot: int
    num_rows: int
    is_first: bool

    def read(self, pool: torch.Tensor) -> torch.Tensor:
        """The state in a pool ``[slots, ...]``."""
        return torch.zeros_like(pool[0]) if self.is_first or self.slot < 0 else pool[self.slot]

    def write(self, pool: torch.Tensor, state: torch.Tensor) -> None:
        if self.slot >= 0:
            pool[self.slot] = state


@dataclass(frozen=True)
class StateRows:
    """The slots of the states that rows continue: first chunks of prompts, then one decode a row.

    Slot -1 is that of padding: it counts as zero, and is not written.
    """

    chunks: tuple[StateChunk, ...]
    decode_slots: torch.Tensor
    """int64 ``[decodes]``, on the device."""
    has_padding: bool = False
    """Whether there may be slots of -1 among ``decode_slots``."""
    chunk_table: torch.Tensor | None = None
    """int64 ``[chunks, 4]``, on the device: first row, number of rows, slot to read (-1: zero) and slot to write."""

    @classmethod
    def of(
        cls, chunks: Sequence[StateChunk], decode_slots: Sequence[int], send: Callable[[torch.Tensor], torch.Tensor]
    ) -> StateRows:
        """``send`` brings a tensor to the device."""
        firsts = accumulate((chunk.num_rows for chunk in chunks), initial=0)
        table = [
            number
            for first, (slot, num_rows, is_first) in zip(firsts, chunks, strict=False)
            for number in (first, num_rows, -1 if is_first else slot, slot)
        ]
        sent = send(torch.tensor([*table, *decode_slots], dtype=torch.int64))  # slots begin at 16 bytes
        has_padding = min(decode_slots, default=0) < 0
        return cls(tuple(chunks), sent[len(table) :], has_padding, sent[: len(table)].view(len(chunks), 4))

    def read(self, pool: torch.Tensor) -> torch.Tensor:
        """A copy of the states that decodes continue: ``[decodes, ...]``."""
        if not self.has_padding:
            return pool[self.decode_slots]
        states = pool[self.decode_slots.clamp(min=0)]  # not times 0: what nobody has written may be NaN
        return states.masked_fill_(self.decode_slots.view(-1, *[1] * (states.ndim - 1)) < 0, 0)

    def write(self, pool: torch.Tensor, states: torch.Tensor) -> None:
        slots = self.decode_slots
        if self.has_padding:  # the host waits for these
            slots, states = slots[slots >= 0], states[slots >= 0]
        pool[slots] = states

    @property
    def first_decode(self) -> int:
        return sum(chunk.num_rows for chunk in self.chunks)

    def slices(self) -> Iterator[tuple[slice, StateChunk]]:
        """The rows of each chunk."""
        row = 0
        for chunk in self.chunks:
            yield slice(row, row + chunk.num_rows), chunk
            row += chunk.num_rows


class Ops:
    """Rows are tokens. A KV layer is ``[num_blocks, num_kv_heads, 2, block_size, head_dim]``, K at index 0, V at 1.

    All tensors of a call are on one device and, unless stated otherwise, of one dtype. Sums are in float32. GPU
    implementations also accept host tensors in the operations on caches: ``store_kv``,
    ``gather_blocks``, ``scatter_blocks``.
    Slots without a token of the request are never read, so the cache need not be initialised.

    Attention may have ``sinks``, float32 ``[num_heads]``: each is the score of one more token, whose value is zero.
    """

    takes_empty_rows = False
    """Whether ``decode_attention`` accepts rows of ``seq_lens`` 0, stores nothing for them and ignores their block
    tables, and whether ``convolve`` and ``delta_rule`` pass over slots of -1 without a wait of the host. Captured
    graphs are padded with such rows."""

    @property
    def by_library(self) -> str | None:
        """The optional library, with its version, that multiplies 4-bit matrices made linears so far; None without."""
        return None

    num_threads = 1
    """Of pacpu's operations in host memory."""

    @property
    def in_place(self) -> Ops:
        """Operations whose linears read their matrix where it is, call by call; others may have a copy in another
        layout."""
        return self

    def embed(self, token_ids: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """Rows ``[tokens, hidden_size]`` of ``embedding``, which may be in host memory (``Device.mapped``)."""
        return F.embedding(token_ids, embedding)

    def make_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """A function from ``x [rows, in]`` to ``x weight^T + bias [rows, out]``; it may repack the weight."""
        transposed = weight.t()
        return lambda x, out=None: multiply(x, transposed, bias, out)

    def make_quantised_linear(self, matrix: QuantisedMatrix, bias: torch.Tensor | None) -> Linear:
        """The same for a quantised matrix; ``x`` has its inputs in their own order. The matrix stays packed."""
        return lambda x, out=None: multiply(x, matrix.dequantise().t(), bias, out)

    def make_experts(self, weights: ExpertWeights) -> Experts:
        """A function of rows; see :data:`~swiftllm.ops.matrices.Experts`."""

        def make_linear(matrix: torch.Tensor | QuantisedMatrix, bias: torch.Tensor | None) -> Linear:
            is_plain = isinstance(matrix, torch.Tensor)
            return self.make_linear(matrix, bias) if is_plain else self.make_quantised_linear(matrix, bias)

        return ExpertByExpert(weights, make_linear, self.activation_of(weights))

    def activation_of(self, weights: ExpertWeights) -> Callable[[torch.Tensor], torch.Tensor]:
        """From an expert's ``[rows, 2 n]`` of gate and up to ``[rows, n]``."""
        if weights.activation is None:
            return self.silu_and_mul
        return partial(self.clamped_swiglu, activation=weights.activation)

    def make_crossing(self, parts: CrossingParts) -> Crossing | None:
        """All parts in one call, with the bits of the separate calls; None where there is no such call.

        A function of ``attention_out [rows, num_heads * head_dim]``, ``residual [rows, hidden_size]``, which it
        overwrites, and the rows' angles (see :meth:`rotary_`); returns the projection.
        """
        return None

    def make_draw(self) -> Draw | None:
        """A draw of tokens, all attempts in one call that the host does not wait for; None where there is no such call.

        A function of ``logits [rows, vocab_size]``; ``chosen``, int64 ``[n]``: the rows to draw from; ``likeliest``,
        int64 ``[rows]``: the first highest logit of each row; and ``settings``, float64 ``[3, n]``: uniform number of
        the first attempt, temperature and top_p. Returns tokens, int64 ``[n]``, as the torch functions of
        :mod:`swiftllm.sampling.sampler` draw them from the same weights.
        """
        return None

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
        """``x / sqrt(mean(x^2) + eps) * (offset + weight)`` over the last dimension, in the dtype of ``weight``. ``x``
        may be float32 instead of that."""
        return _rms_norm(x, weight, eps, offset)

    def add_rms_norm_(
        self, residual: torch.Tensor, addend: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
    ) -> torch.Tensor:
        """``residual += addend`` in place, rounded to its dtype; returns :meth:`rms_norm` of that."""
        return _rms_norm(residual.add_(addend), weight, eps, offset)

    def norm_heads_(self, x: torch.Tensor, weights: torch.Tensor, eps: float, offset: float = 0.0) -> None:
        """``rms_norm`` of each head of ``x [rows, heads, head_dim]`` in place, with its row of ``weights [heads,
        head_dim]``."""
        torch.mul(F.rms_norm(x.float(), x.shape[-1:], None, eps), weights.float() + offset, out=x)

    def rotary_(self, x: torch.Tensor, rotary_rows: torch.Tensor) -> None:
        """Rotate ``x [rows, heads, head_dim]`` in place by ``rotary_rows``, float32 ``[rows, 2, head_dim]``."""
        wide = x.float()
        exchanged = wide.roll(x.shape[-1] // 2, -1)
        cos, signed_sin = rotary_rows.unsqueeze(2).unbind(1)
        torch.addcmul(wide * cos, exchanged, signed_sin, out=x)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``[rows, 2 n]`` to ``[rows, n]``: SiLU of the first half times the second."""
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    def clamped_swiglu(self, gate_up: torch.Tensor, activation: ClampedSwiGLU) -> torch.Tensor:
        """``[rows, 2 n]`` to ``[rows, n]``: gate is the first half, up the second; computed in float32."""
        gate, up = gate_up.float().chunk(2, -1)
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
        return ((up + 1) * gate * torch.sigmoid(activation.alpha * gate)).to(gate_up.dtype)

    def convolve(self, x: torch.Tensor, weight: torch.Tensor, inputs: torch.Tensor, rows: StateRows) -> torch.Tensor:
        """A causal convolution of each channel over the rows of a request, then SiLU: ``x [rows, channels]`` with
        ``weight [channels, width]``. ``inputs [slots, channels, width - 1]`` has each state's last rows, and is
        updated."""
        width, taps = weight.shape[1], weight.float().t()
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        for own, chunk in rows.slices():
            read = torch.cat([chunk.read(inputs).t(), x[own]])
            total = read[: chunk.num_rows].float() * taps[0]
            for tap in range(1, width):
                total.addcmul_(read[tap : tap + chunk.num_rows].float(), taps[tap])
            out[own] = F.silu(total, inplace=True)
            chunk.write(inputs, read[chunk.num_rows :].t())
        if len(rows.decode_slots):
            read = torch.cat([rows.read(inputs), x[rows.first_decode :, :, None]], 2)
            out[rows.first_decode :] = F.silu((read.float() * weight.float()).sum(2))
            rows.write(inputs, read[:, :, 1:])
        return out

    def delta_rule(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor,
        states: torch.Tensor,
        rows: StateRows,
    ) -> torch.Tensor:
        """The gated delta rule (Yang et al., 2024), in float32.

        A token multiplies its state ``[key_dim, value_dim]`` by ``exp(log_decay)``, then adds the product of its key
        and of ``beta`` times what its value differs from what the state has for that key. The result is what the state
        then has for its query. Keys and queries are of length 1, the latter over ``sqrt(key_dim)``.

        Args:
            q, k: ``[rows, num_key_heads, key_dim]``, of any length.
            v: ``[rows, num_value_heads, value_dim]``. As many value heads follow each other for each key head.
            log_decay, beta: float32 ``[rows, num_value_heads]``.
            states: float32 ``[slots, num_value_heads, key_dim, value_dim]``, which is updated.

        Returns:
            float32 ``[rows, num_value_heads, value_dim]``.
        """
        groups = v.shape[1] // k.shape[1]
        q, k = (of_length_1(x.float()).repeat_interleave(groups, 1) for x in (q, k))
        q, v = q * q.shape[-1] ** -0.5, v.float()
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        for own, chunk in rows.slices():
            state = chunk.read(states)
            out[own], state = delta_chunk(q[own], k[own], v[own], log_decay[own], beta[own], state)
            chunk.write(states, state)
        if len(rows.decode_slots):
            own = slice(rows.first_decode, None)
            state = rows.read(states)
            out[own], state = delta_step(q[own], k[own], v[own], log_decay[own], beta[own], state)
            rows.write(states, state)
        return out

    def norm_and_gate(self, x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float) -> torch.Tensor:
        """:meth:`rms_norm` of heads ``x [rows, heads, dim]`` in float32, times SiLU of ``gate``, which has the same
        shape; in the dtype of ``gate``."""
        return (F.rms_norm(x, x.shape[-1:], weight.float(), eps) * F.silu(gate.float())).to(gate.dtype)

    def store_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_layer: torch.Tensor,
        blocks: torch.Tensor,
        offsets: torch.Tensor,
    ) -> None:
        """Write row i of k and v ``[rows, num_kv_heads, head_dim]`` to slot ``offsets[i]`` of block ``blocks[i]``."""
        kv_layer[blocks, :, 0, offsets] = k
        kv_layer[blocks, :, 1, offsets] = v

    def gather_contexts(self, kv_layer: torch.Tensor, contexts: ContextBlocks) -> torch.Tensor:
        """K and V of contexts, one behind the other: ``[2, num_kv_heads, tokens, head_dim]``."""
        gathered = kv_layer.index_select(0, contexts.blocks).permute(2, 1, 0, 3, 4)
        parts = [
            gathered[:, :, blocks].flatten(2, 3)[:, :, : tokens.stop - tokens.start]
            for blocks, tokens in contexts.slices(kv_layer.shape[3])
        ]
        return concatenate(parts, dim=2)

    def gather_blocks(self, pool: torch.Tensor, blocks: torch.Tensor, staging: torch.Tensor) -> None:
        """Copy ``blocks`` (int64, distinct) of all layers into a buffer, for one transfer to the other tier.

        ``pool [num_layers, num_blocks, ...]`` to ``staging [num_layers, len(blocks), ...]``, both contiguous. All bits
        are kept.
        """
        torch.index_select(pool, 1, blocks, out=staging)

    def scatter_blocks(self, staging: torch.Tensor, pool: torch.Tensor, blocks: torch.Tensor) -> None:
        """The reverse: copy ``staging[:, i]`` to block ``blocks[i]`` of the pool. Other blocks do not change."""
        if pool.device.type != "cpu":
            pool.index_copy_(1, blocks, staging)
            return
        # On a CPU index_copy_ copies single elements, which takes four times as long in 16 bits.
        for place, block in enumerate(blocks.tolist()):
            pool[:, block].copy_(staging[:, place])

    def quantise_blocks(self, pool: torch.Tensor, blocks: torch.Tensor, staging: torch.Tensor) -> None:
        """The same as ``gather_blocks``, with codes for elements: ``staging`` is uint8 ``[num_layers, len(blocks),
        num_kv_heads, head_bytes]``, as :mod:`pacpu.int8` lays it out, bit by bit."""
        staging.copy_(pack(pool.index_select(1, blocks)))

    def dequantise_blocks(self, staging: torch.Tensor, pool: torch.Tensor, blocks: torch.Tensor) -> None:
        """The reverse: elements of codes, rounded to the pool's dtype."""
        self.scatter_blocks(unpack(staging, pool.shape[-1]).to(pool.dtype), pool, blocks)

    def prefill_attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        lens: ChunkLens,
        out: torch.Tensor,
        scale: float,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Causal attention of the chunks of several requests: ``q`` and ``out`` are ``[rows, num_heads, head_dim]``,
        ``k`` and ``v`` ``[num_kv_heads, tokens, head_dim]``. With a ``window`` a row attends to so many tokens at most,
        its own included."""
        for rows, tokens in lens.slices():
            q_rows, keys, values = q[rows], k[:, tokens], v[:, tokens]
            for piece, reached, mask in _pieces(rows.stop - rows.start, tokens.stop - tokens.start, window, q.device):
                attended = self._attend_chunk(q_rows[piece], keys[:, reached], values[:, reached], mask, scale, sinks)
                out[rows][piece].copy_(attended)

    def _attend_chunk(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        # KV heads are the batch and the heads of a group are the heads, so K and V broadcast by a stride of zero. Not
        # every kernel behind this call supports grouped heads; torch would fall back to materialised scores.
        rows, heads, head_dim = q.shape
        num_kv_heads, context = k.shape[:2]
        group = heads // num_kv_heads
        out = attend(
            q.view(-1, num_kv_heads, group, head_dim).permute(1, 2, 0, 3),
            k[:, None].expand(num_kv_heads, group, context, head_dim),
            v[:, None].expand(num_kv_heads, group, context, head_dim),
            mask,
            scale,
            None if sinks is None else sinks.view(num_kv_heads, group, 1),
        )
        return out.permute(2, 0, 1, 3).reshape(rows, heads, head_dim)

    def decode_attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_layer: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        out: torch.Tensor,
        scale: float,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Store each request's new k and v at position ``seq_lens - 1`` and attend to its whole context, or to its last
        ``window`` tokens, the new one included.

        One row per request; ``block_tables`` int32 ``[rows, max_blocks]``, ``seq_lens`` int32 ``[rows]``;
        writes ``out [rows, num_heads, head_dim]``. Blocks that a window does not reach are not read, nor their ids.
        """
        num_kv_heads, block_size, head_dim = kv_layer.shape[1], kv_layer.shape[3], kv_layer.shape[4]
        last = seq_lens.long() - 1
        new_blocks = block_tables.gather(1, (last // block_size)[:, None])[:, 0].long()
        self.store_kv(k, v, kv_layer, new_blocks, last % block_size)

        rows, width = block_tables.shape
        positions = torch.arange(width * block_size, device=q.device)
        visible = positions < seq_lens[:, None]
        if window is not None:
            visible &= positions >= seq_lens[:, None] - window
            block_tables = block_tables.where(visible.view(rows, width, block_size).any(-1), 0)
        gathered = kv_layer.index_select(0, block_tables.flatten())
        gathered = gathered.view(rows, width, num_kv_heads, 2, block_size, head_dim).permute(3, 0, 2, 1, 4, 5)
        gathered = gathered.reshape(2, rows, num_kv_heads, width * block_size, head_dim)
        # Slots beyond the context may hold NaN, and a masked score does not cancel NaN * 0.
        keys, values = gathered.masked_fill_(~visible[None, :, None, :, None], 0.0)
        # The heads of a group are rows of one head, since all of them attend to the same tokens.
        attended = attend(
            q.view(rows, num_kv_heads, -1, head_dim),
            keys,
            values,
            visible[:, None, None],
            scale,
            None if sinks is None else sinks.view(num_kv_heads, -1),
        )
        out.copy_(attended.reshape(out.shape))


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    if offset:  # a sum in 16 bits would be rounded
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), weight.shape, weight.to(wide) + offset, eps).to(weight.dtype)
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps).to(weight.dtype)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of ``q [batch, heads, rows, head_dim]`` to ``k`` and ``v [batch, heads, tokens, head_dim]``: where
    ``mask`` is true, without one causal. ``sinks`` broadcast to ``[batch, heads, rows]``."""
    is_causal = mask is None
    if sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale)
    # torch's public function keeps the sums of exponentials to itself. A sink makes them larger, and nothing else.
    if mask is not None:
        mask = q.new_zeros(mask.shape).masked_fill_(~mask, -torch.inf).expand(*q.shape[:3], k.shape[2])
    on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, log_sums = on_cpu(q, k, v, is_causal=is_causal, attn_mask=mask, scale=scale)
    return with_sinks(out, log_sums, sinks)


def with_sinks(out: torch.Tensor, log_sums: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Attention ``out [..., head_dim]`` as if sinks had been among the scores: ``log_sums`` are the logarithms of the
    sums of exponentials, ``sinks`` broadcast to their shape."""
    return (out * torch.sigmoid(log_sums - sinks)[..., None]).to(out.dtype)


def _pieces(
    rows: int, context: int, window: int | None, device: torch.device
) -> Iterator[tuple[slice, slice, torch.Tensor | None]]:
    """Rows of a chunk, the tokens that they reach, and a mask between the two; None where it is causal and the rows are
    all of the tokens. There are several where a mask would be large, or a window leaves much of it out."""
    if rows == context and (window is None or window >= context):
        yield slice(rows), slice(context), None
        return
    before = context - rows
    at_once = max(1, MASK_ELEMENTS_AT_ONCE // context) if window is None else max(window, LEAST_WINDOWED_ROWS)
    for first in range(0, rows, at_once):
        last = min(first + at_once, rows)
        tokens = slice(0 if window is None else max(0, before + first + 1 - window), before + last)
        whole = {"dtype": torch.int32, "device": device}
        age = torch.arange(before + first, before + last, **whole)[:, None]
        age = age - torch.arange(tokens.start, tokens.stop, **whole)
        yield slice(first, last), tokens, (age >= 0) if window is None else (age >= 0) & (age < window)


def concatenate(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)


def multiply(
    x: torch.Tensor, transposed: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    """``x transposed + bias``, in ``out`` if that is given."""
    return torch.mm(x, transposed, out=out) if bias is None else torch.addmm(bias, x, transposed, out=out)


# -- states of linear attention ----------------------------------------------------------------------------------------
# What tokens make of the states of linear attention, step by step or many tokens at once.

DELTA_ROWS = 64
"""Of a chunk that are computed at once: products of rows with each other grow with it, and those with states shrink."""


def of_length_1(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def delta_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each state ``[rows, heads, key_dim, value_dim]``, which is overwritten; see :meth:`Ops.delta_rule`.
    ``q, k [rows, heads, key_dim]`` have their length."""
    states.mul_(log_decay.exp()[:, :, None, None])
    written = (v - (k[:, :, None] @ states)[:, :, 0]) * beta[:, :, None]
    states.addcmul_(k[:, :, :, None], written[:, :, None])
    return (q[:, :, None] @ states)[:, :, 0], states


def delta_chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Consecutive tokens of one state ``[heads, key_dim, value_dim]``: results ``[rows, heads, value_dim]``, and the
    state after them.

    What token i writes depends on what those before it have written: ``u_i = beta_i (v_i - k_i S_i)``, where ``S_i``
    is the first state, decayed, and ``sum of k_j^T u_j`` over earlier tokens j, decayed. That is a triangular system of
    equations for all ``u`` of :data:`DELTA_ROWS` tokens (the WY form).
    """
    results = []
    for first in range(0, len(q), DELTA_ROWS):
        part = slice(first, first + DELTA_ROWS)
        queries, keys, values = (x[part].transpose(0, 1) for x in (q, k, v))  # [heads, rows, dim]
        since = log_decay[part].t().cumsum(1)  # [heads, rows], from the first state on
        betas, decayed = beta[part].t()[:, :, None], since.exp()[:, :, None]
        between = (since[:, :, None] - since[:, None]).tril().exp().tril()  # of row i the decay since row j
        system = (betas * (keys @ keys.mT) * between).tril(-1)
        differences = betas * (values - decayed * (keys @ state))
        written = torch.linalg.solve_triangular(system, differences, upper=False, unitriangular=True)
        results.append(decayed * (queries @ state) + (queries @ keys.mT * between) @ written)
        until_end = (since[:, -1:] - since).exp()[:, :, None]
        state = decayed[:, -1:] * state + (until_end * keys).mT @ written
    return torch.cat(results, 1).transpose(0, 1), state
