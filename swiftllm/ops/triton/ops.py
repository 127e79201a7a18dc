"""Operations for rows on an NVIDIA GPU: Triton between the GEMMs, torch for the GEMMs and for prefill attention.

Only this module launches the kernels of its package. It chooses tile sizes and warps from shapes, dtype and compute
capability alone, never by measuring at run time.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch

from pacpu import rows as host_rows
from pacpu.int8 import TILE_TOKENS
from swiftllm.ops.interface import ChunkLens, ContextBlocks, Draw, Linear, Ops, StateRows, multiply, with_sinks
from swiftllm.ops.library import GroupedProduct, LibraryProducts, how_to_install, installed_version
from swiftllm.ops.matrices import BLOCK_INPUTS, Experts, ExpertWeights, QuantisedMatrix
from swiftllm.ops.triton.attention import (
    decode_combine_kernel,
    decode_partials_dot_kernel,
    decode_partials_lanes_kernel,
)
from swiftllm.ops.triton.kv_cache import (
    copy_blocks_kernel,
    dequantise_blocks_kernel,
    gather_contexts_kernel,
    quantise_blocks_kernel,
    store_kv_kernel,
)
from swiftllm.ops.triton.linear_attention import convolve_kernel, delta_rule_kernel, norm_and_gate_kernel
from swiftllm.ops.triton.matrices import (
    GroupedExperts,
    combine_splits_kernel,
    dequantise_kernel,
    quantised_linear_kernel,
)
from swiftllm.ops.triton.rows import (
    MOST_TILE,
    add_rms_norm_kernel,
    draw_kernel,
    embed_kernel,
    norm_heads_kernel,
    rms_norm_kernel,
    rotary_kernel,
    silu_and_mul_kernel,
)
from swiftllm.ops.triton.tiles import (
    MIN_DOT_TILE,
    blocks_per_split,
    cdiv,
    linear_tiles,
    next_power_of_2,
    tokens_per_split,
)

# -- prefill attention -------------------------------------------------------------------------------------------------
# Prefill attention on an NVIDIA GPU by torch's kernels for sequences of different lengths, without masks.
#
# FlashAttention is one call for all chunks, in 16 bits from sm_80 on. Elsewhere (sm_75, float32) torch's
# memory-efficient kernel is one call for all chunks where each head has its own K and V, and one for each chunk
# otherwise: it knows no groups of heads, but K and V of a single sequence may be broadcast to them. Both kernels align
# a causal mask with the last token, as a chunk is the end of its context.

FLASH_CAPABILITY, FLASH_MOST_HEAD_DIM = 80, 256
CAUSAL_FROM_LAST = 2  # custom_mask_type of the memory-efficient kernel
# Rows in a block of that kernel, or half of them. If K and V are broadcast and the last block has a single row, it
# treats heads as rows, and then forgets the window and writes the sums of exponentials elsewhere.
QUERY_BLOCK = 32


def takes_flash(q: torch.Tensor, capability: int) -> bool:
    """Whether FlashAttention computes attention of ``q [rows, num_heads, head_dim]``."""
    return capability >= FLASH_CAPABILITY and q.dtype.itemsize == 2 and q.shape[2] <= FLASH_MOST_HEAD_DIM


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lens: ChunkLens,
    out: torch.Tensor,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> None:
    """See :meth:`swiftllm.ops.interface.Ops.prefill_attention`."""
    starts = lens.row_starts, lens.token_starts, max(lens.rows), max(lens.tokens)
    reach = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
    attended, log_sums, *_ = torch.ops.aten._flash_attention_forward(
        q, k.transpose(0, 1), v.transpose(0, 1), *starts, 0.0, True, False, scale=scale, **reach
    )
    out.copy_(attended if sinks is None else with_sinks(attended, log_sums.t(), sinks))


def efficient_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lens: ChunkLens,
    out: torch.Tensor,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> None:
    """The same by the memory-efficient kernel."""
    how = {"scale": scale, "window_size": window}
    attend = torch.ops.aten._efficient_attention_forward
    if k.shape[0] == q.shape[1] and sinks is None:
        starts = lens.row_starts, lens.token_starts, max(lens.rows), max(lens.tokens)
        sequences = (x[None] for x in (q, k.transpose(0, 1), v.transpose(0, 1)))
        out.copy_(attend(*sequences, None, *starts, 0.0, CAUSAL_FROM_LAST, **how)[0][0])
        return
    kv_heads, group = k.shape[0], q.shape[1] // k.shape[0]
    for rows, tokens in lens.slices():
        extra, queries = int((rows.stop - rows.start) % QUERY_BLOCK == 1), q[rows]
        if extra:
            queries = torch.cat((queries[:1], queries))  # in front, where it moves no other row
        # [kv heads, rows or tokens, heads of a group, head_dim]
        queries = queries.unflatten(1, (kv_heads, group)).transpose(0, 1)
        context = (x[:, tokens, None].expand(-1, -1, group, -1) for x in (k, v))
        attended, log_sums, *_ = attend(
            queries, *context, None, None, None, None, None, 0.0, CAUSAL_FROM_LAST, sinks is not None, **how
        )
        if sinks is not None:  # sums are [kv heads, heads of a group, rows padded to whole blocks]
            sums = log_sums[..., : attended.shape[1]].transpose(1, 2)
            attended = with_sinks(attended, sums, sinks.view(kv_heads, 1, group))
        out[rows].copy_(attended[:, extra:].transpose(0, 1).flatten(1, 2))


# -- operations --------------------------------------------------------------------------------------------------------

LOG2_E = math.log2(math.e)
TENSOR_CORES = 80  # lowest compute capability for which Triton emits tensor-core code
ELEMENTS_PER_WARP = 512  # of a row: 16 per thread
MAX_WARPS = 16
COLUMNS_TILE = 1024
HEADS_TILE = 8
COPY_WORDS_TILE = 2048  # 8 KiB: 16 words per thread, in four 16-byte accesses
DOT_STAGES = 5  # the fewest with which Triton keeps two tiles of K and V in flight behind the ids of their blocks
# Slots x dims of a tile of K, 8 KiB in 16 bits. In the lanes formulation: heads x slots x dims, which is 32 sums per
# thread at 4 warps, and half of that in float32. Twice as many spill registers: on sm_86 for heads of 256 dims, and on
# sm_80 in float32 with Triton 3.6.
TILE_ELEMENTS = 4096
COMBINE_TILE = 16
CONVOLVED_ROWS, CONVOLVED_CHANNELS = 16, 128
# Columns of a state in a program. A decode reads whole cache lines of it. A chunk is a loop of rows that wait for each
# other: one warp needs no barrier for its sums, and many programs share a multiprocessor.
DECODED_COLUMNS, DECODE_WARPS = 32, 4
CHUNK_COLUMNS, CHUNK_WARPS = 8, 1
# Programs of 4 warps that a multiprocessor has registers for, with up to 128 per thread. Shared memory may hold fewer.
MOST_PROGRAMS = 4
# What a program takes of it at most, as compiled: decode attention, and the 4-bit product by the rows of its tile.
# ``tests/triton/compiled*.py`` hold these against the compiler.
DOT_SHARED_BYTES, LANES_SHARED_BYTES = 38 << 10, 16 << 10
QUANTISED_SHARED_BYTES = {16: 25 << 10, 32: 33 << 10, 64: 43 << 10}
LEAST_SHARED_BYTES = 64 << 10  # of a multiprocessor: sm_75
# With more rows than this, writing the matrix out in full and multiplying it by a library is faster: reading and
# writing it are then a small part of the work. Where that begins was not measured (benchmarks/bench_gpu.py does). By
# bytes and operations it is at 640 rows of an A10, 700 of an A100 and 960 of an H100 (docs/features/quantisation.md).
MOST_QUANTISED_ROWS = 512
MOST_SUMMED_ROWS = 4  # without tensor cores: by multiply-adds, each code is unpacked once for all rows
SUMMED_COLUMNS_TILE = 32  # 64 would spill
# On sm_90 the assembler aims at five programs per multiprocessor with tiles of 32 rows, and spills two registers for it
# (Triton 3.7). It is told to be content with four. Other tiles and chips need no limit, and some have to exceed this.
SPILLING_TILE, ITS_REGISTERS = (90, 32), 128
DEQUANTISED_COLUMNS_TILE = 128


class TritonOps(Ops):
    """See :class:`swiftllm.ops.interface.Ops` for the contracts. Caches in host memory are left to pacpu and torch.

    Rows of q, k, v and x may be strided. Their heads and dims must be contiguous, else ``ValueError`` is raised.
    """

    takes_empty_rows = True

    def __init__(
        self,
        device: torch.device,
        capability: int,
        num_multiprocessors: int,
        library: LibraryProducts | None = None,
        shared_bytes: int = LEAST_SHARED_BYTES,
    ) -> None:
        """``capability`` is the GPU's compute capability, 75 for sm_75. The number of multiprocessors and the shared
        memory of each decide how many splits a decode has. ``library`` multiplies 4-bit matrices where it measures
        faster."""
        self._library = library
        self._shared_bytes = shared_bytes
        self._device = device
        self._capability = capability
        self._num_multiprocessors = num_multiprocessors
        self.most_quantised_rows = MOST_QUANTISED_ROWS
        """Rows up to which codes are multiplied, and beyond which the matrix is written out first."""
        # For the whole process: torch prefers cuDNN's attention on sm_90. That builds a plan, in tens of milliseconds,
        # for each new number of rows and tokens, and prompts have many different ones.
        torch.backends.cuda.enable_cudnn_sdp(False)

    @property
    def in_place(self) -> Ops:
        about = self._device, self._capability, self._num_multiprocessors
        return self if self._library is None else TritonOps(*about, shared_bytes=self._shared_bytes)

    @property
    def by_library(self) -> str | None:
        return None if self._library is None else self._library.description

    def make_quantised_linear(self, matrix: QuantisedMatrix, bias: torch.Tensor | None) -> Linear:
        if matrix.is_mxfp4:  # which no model has but for its experts
            return super().make_quantised_linear(matrix, bias)
        own = self._make_own_linear(matrix, bias)
        linear = own if self._library is None else self._library.choose_linear(matrix, bias, own)
        if linear is own and self._capability < TENSOR_CORES:
            warnings.warn(
                f"Triton has no tensor cores on this GPU (sm_{self._capability}): 4-bit weights are written out in "
                f"full before each multiplication of more than {MOST_SUMMED_ROWS} rows. They save memory, but a step "
                "of few more takes about 2.3 times as long as with 16-bit weights"
                f"{'' if installed_version() else f'. In float16 {how_to_install()}'}",
                stacklevel=2,
            )
        return linear

    def _make_own_linear(self, matrix: QuantisedMatrix, bias: torch.Tensor | None) -> Linear:
        def linear(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
            if matrix.order is not None:
                x = x.index_select(1, matrix.order)
            if x.shape[0] <= (self.most_quantised_rows if self._has_tensor_cores(x) else MOST_SUMMED_ROWS):
                return self._multiply_codes(x, matrix, bias, out)
            return multiply(x, _dequantise_transposed(matrix), bias, out)

        return linear

    def make_experts(self, weights: ExpertWeights) -> Experts:
        def of_products(*products: GroupedProduct) -> Experts:
            return GroupedExperts(weights, *how, products)

        how = self.silu_and_mul, self._has_tensor_cores, launch
        own = GroupedExperts(weights, *how)
        return own if self._library is None else self._library.choose_experts(weights, own, of_products)

    def make_draw(self) -> Draw:
        return self.draw

    def draw(
        self, logits: torch.Tensor, chosen: torch.Tensor, likeliest: torch.Tensor, settings: torch.Tensor
    ) -> torch.Tensor:
        """See :meth:`make_draw`."""
        tokens, size = torch.empty_like(chosen), logits.shape[1]
        if len(chosen):
            tile = min(next_power_of_2(size), MOST_TILE)
            tensors, sizes = (logits, chosen, likeliest, settings, tokens), (len(chosen), size, tile)
            launch(draw_kernel, (len(chosen),), *tensors, _row_stride(logits), *sizes, num_warps=_row_warps(tile))
        return tokens

    def _multiply_codes(
        self, x: torch.Tensor, matrix: QuantisedMatrix, bias: torch.Tensor | None, out: torch.Tensor | None
    ) -> torch.Tensor:
        rows, columns = x.shape[0], matrix.out_features
        if out is None:
            out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
        if not rows:
            return out
        by_dot = self._has_tensor_cores(x)
        if by_dot:
            rows_tile, columns_tile = linear_tiles(rows)
            programs = self._programs_at_once(QUANTISED_SHARED_BYTES[rows_tile])
        else:
            rows_tile, columns_tile = next_power_of_2(rows), SUMMED_COLUMNS_TILE
            programs = self._programs_at_once(LANES_SHARED_BYTES)
        grid = cdiv(rows, rows_tile), cdiv(columns, columns_tile)
        blocks = cdiv(matrix.in_features, BLOCK_INPUTS)
        per_split = blocks_per_split(blocks, grid[0] * grid[1], programs)
        splits = cdiv(blocks, per_split)
        partial = torch.empty((splits, rows, columns), dtype=torch.float32, device=x.device)
        launch(
            quantised_linear_kernel, (*grid, splits),
            x, *_quantised_tensors(matrix), partial, _row_stride(x), rows, per_split,
            matrix.in_features, columns, matrix.group_size, matrix.runs is not None, rows_tile, columns_tile, by_dot,
            num_warps=4, max_registers=ITS_REGISTERS if (self._capability, rows_tile) == SPILLING_TILE else None,
        )  # fmt: skip
        launch(
            combine_splits_kernel, (rows, cdiv(columns, COLUMNS_TILE)),
            partial, partial if bias is None else bias, out, _row_stride(out), rows, splits,
            columns, bias is not None, COLUMNS_TILE,
            num_warps=4,
        )  # fmt: skip
        return out

    def embed(self, token_ids: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        rows, size = len(token_ids), embedding.shape[1]
        out, grid = embedding.new_empty((rows, size), device=token_ids.device), (rows, cdiv(size, COLUMNS_TILE))
        launch(embed_kernel, grid, token_ids, embedding, out, size, COLUMNS_TILE, num_warps=4)
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
        rows, size = x.shape
        out = torch.empty((rows, size), dtype=weight.dtype, device=x.device)
        if rows:
            tile = next_power_of_2(size)
            numbers = _row_stride(x), eps, offset, size, tile
            launch(rms_norm_kernel, (rows,), x, weight, out, *numbers, num_warps=_row_warps(tile))
        return out

    def add_rms_norm_(
        self, residual: torch.Tensor, addend: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
    ) -> torch.Tensor:
        rows, size = residual.shape
        out = torch.empty((rows, size), dtype=weight.dtype, device=residual.device)
        if rows:
            tile = next_power_of_2(size)
            tensors, strides = (residual, addend, weight, out), (_row_stride(residual), _row_stride(addend))
            numbers = *strides, eps, offset, size, tile
            launch(add_rms_norm_kernel, (rows,), *tensors, *numbers, num_warps=_row_warps(tile))
        return out

    def norm_heads_(self, x: torch.Tensor, weights: torch.Tensor, eps: float, offset: float = 0.0) -> None:
        rows, heads, head_dim = x.shape
        if rows:
            grid = (rows, cdiv(heads, HEADS_TILE))
            sizes = heads, head_dim, HEADS_TILE, next_power_of_2(head_dim)
            launch(norm_heads_kernel, grid, x, weights, _row_stride(x), eps, offset, *sizes, num_warps=1)

    def rotary_(self, x: torch.Tensor, rotary_rows: torch.Tensor) -> None:
        rows, heads, head_dim = x.shape
        if rows:
            grid = (rows, cdiv(heads, HEADS_TILE))
            sizes = heads, head_dim, HEADS_TILE, next_power_of_2(head_dim // 2)
            launch(rotary_kernel, grid, x, rotary_rows, _row_stride(x), *sizes, num_warps=1)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
        if rows:
            grid = (rows, cdiv(size, COLUMNS_TILE))
            sizes = size, COLUMNS_TILE
            launch(silu_and_mul_kernel, grid, gate_up, out, _row_stride(gate_up), *sizes, num_warps=4)
        return out

    def convolve(self, x: torch.Tensor, weight: torch.Tensor, inputs: torch.Tensor, rows: StateRows) -> torch.Tensor:
        channels, width = weight.shape
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        tiles = cdiv(channels, CONVOLVED_CHANNELS)

        def launch_sequences(row_tiles: int, sequences: int, *about: Any, rows_tile: int, num_warps: int) -> None:
            sizes = channels, width, rows_tile, CONVOLVED_CHANNELS
            grid = tiles, row_tiles, sequences
            launch(convolve_kernel, grid, x, weight, inputs, *about, _row_stride(x), *sizes, num_warps=num_warps)

        if rows.chunks:
            rows_tile = max(CONVOLVED_ROWS, next_power_of_2(width - 1))
            row_tiles = cdiv(max(chunk.num_rows for chunk in rows.chunks), rows_tile)
            about = rows.chunk_table, None, out, 0
            launch_sequences(row_tiles, len(rows.chunks), *about, rows_tile=rows_tile, num_warps=4)
        if decodes := len(rows.decode_slots):
            about = None, rows.decode_slots, out, rows.first_decode
            launch_sequences(1, decodes, *about, rows_tile=1, num_warps=1)
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
        heads, key_dim, value_dim = states.shape[1:]
        out = torch.empty(v.shape, dtype=torch.float32, device=v.device)
        of_rows = q, k, v, log_decay, beta
        strides = *map(_row_stride, of_rows), key_dim**-0.5
        sizes = heads, heads // k.shape[1], key_dim, value_dim, next_power_of_2(key_dim)

        def launch_sequences(sequences: int, *about: Any, columns: int, num_warps: int) -> None:
            columns = min(columns, next_power_of_2(value_dim))
            grid, tensors = (cdiv(value_dim, columns), heads, sequences), (*of_rows, states, *about)
            launch(delta_rule_kernel, grid, *tensors, *strides, *sizes, columns, num_warps=num_warps)

        if rows.chunks:
            about = rows.chunk_table, None, out, 0
            launch_sequences(len(rows.chunks), *about, columns=CHUNK_COLUMNS, num_warps=CHUNK_WARPS)
        if decodes := len(rows.decode_slots):
            about = None, rows.decode_slots, out, rows.first_decode
            launch_sequences(decodes, *about, columns=DECODED_COLUMNS, num_warps=DECODE_WARPS)
        return out

    def norm_and_gate(self, x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float) -> torch.Tensor:
        rows, heads, head_dim = x.shape
        out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        if rows:
            grid = rows, cdiv(heads, HEADS_TILE)
            sizes = heads, head_dim, HEADS_TILE, next_power_of_2(head_dim)
            launch(norm_and_gate_kernel, grid, x, weight, gate, out, _row_stride(gate), eps, *sizes, num_warps=1)
        return out

    def store_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_layer: torch.Tensor,
        blocks: torch.Tensor,
        offsets: torch.Tensor,
    ) -> None:
        if kv_layer.device.type != self._device.type:
            return host_rows.store_kv(k, v, kv_layer, blocks, offsets, num_threads=self.num_threads)
        rows, heads, head_dim = k.shape
        if rows:
            grid = (rows, cdiv(heads, HEADS_TILE))
            sizes = heads, head_dim, kv_layer.shape[3], HEADS_TILE, next_power_of_2(head_dim)
            strides = _row_stride(k), _row_stride(v)
            launch(store_kv_kernel, grid, k, v, kv_layer, blocks, offsets, *strides, *sizes, num_warps=2)

    def gather_blocks(self, pool: torch.Tensor, blocks: torch.Tensor, staging: torch.Tensor) -> None:
        if pool.device.type != self._device.type:
            return super().gather_blocks(pool, blocks, staging)
        _copy_blocks(pool, staging, blocks, gather=True)

    def scatter_blocks(self, staging: torch.Tensor, pool: torch.Tensor, blocks: torch.Tensor) -> None:
        if pool.device.type != self._device.type:
            return super().scatter_blocks(staging, pool, blocks)
        _copy_blocks(pool, staging, blocks, gather=False)

    def quantise_blocks(self, pool: torch.Tensor, blocks: torch.Tensor, staging: torch.Tensor) -> None:
        _convert_blocks(quantise_blocks_kernel, pool, staging, blocks)

    def dequantise_blocks(self, staging: torch.Tensor, pool: torch.Tensor, blocks: torch.Tensor) -> None:
        _convert_blocks(dequantise_blocks_kernel, pool, staging, blocks)

    def gather_contexts(self, kv_layer: torch.Tensor, contexts: ContextBlocks) -> torch.Tensor:
        _, heads, _, block_size, head_dim = kv_layer.shape
        tokens = sum(contexts.tokens)
        out = kv_layer.new_empty((2, heads, tokens, head_dim))
        if tokens:
            grid = (len(contexts.blocks), heads)
            sizes = heads, head_dim, block_size, next_power_of_2(block_size), next_power_of_2(head_dim)
            tensors = kv_layer, out, contexts.blocks, contexts.columns
            launch(gather_contexts_kernel, grid, *tensors, len(contexts.blocks), tokens, *sizes, num_warps=4)
        return out

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
        if q.device.type == "cpu":
            return super().prefill_attention(q, k, v, lens, out, scale, window, sinks)
        attend = flash_attention if takes_flash(q, self._capability) else efficient_attention
        attend(q, k, v, lens, out, scale, window, sinks)

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
        rows, heads, head_dim = q.shape
        if not rows:
            return
        num_kv_heads, block_size = kv_layer.shape[1], kv_layer.shape[3]
        group, dim_tile = heads // num_kv_heads, next_power_of_2(head_dim)
        context = block_tables.shape[1] * block_size
        if window is not None:
            context = min(context, window)
        if self._has_tensor_cores(q):
            kernel, group_tile = decode_partials_dot_kernel, max(MIN_DOT_TILE, next_power_of_2(group))
            tile, shared_bytes = max(MIN_DOT_TILE, TILE_ELEMENTS // dim_tile), DOT_SHARED_BYTES
        else:
            kernel, group_tile = decode_partials_lanes_kernel, next_power_of_2(group)
            tile = max(1, 2 * TILE_ELEMENTS // (q.dtype.itemsize * group_tile * dim_tile))
            shared_bytes = LANES_SHARED_BYTES
        split_tokens = tokens_per_split(rows * num_kv_heads, context, self._programs_at_once(shared_bytes))
        num_splits = cdiv(context, split_tokens)
        partial_out, partial_lse, is_one = out, out, num_splits == 1  # which the first kernel then writes by itself
        if not is_one:
            partial_out = torch.empty((rows, heads, num_splits, head_dim), dtype=torch.float32, device=q.device)
            partial_lse = torch.empty((rows, heads, num_splits), dtype=torch.float32, device=q.device)
        launch(
            kernel, (num_splits, num_kv_heads, rows),
            q, k, v, kv_layer, block_tables, seq_lens, partial_out, partial_lse, sinks, scale * LOG2_E,
            _row_stride(q), _row_stride(k), _row_stride(v), _row_stride(out), block_tables.stride(0),
            num_splits, split_tokens,
            num_kv_heads, group, head_dim, block_size, group_tile, dim_tile, tile, is_one, window,
            num_warps=4, num_stages=DOT_STAGES,
        )  # fmt: skip
        if is_one:
            return
        launch(
            decode_combine_kernel, (heads, rows),
            partial_out, partial_lse, seq_lens, sinks, out, _row_stride(out), num_splits, split_tokens,
            heads, head_dim, dim_tile, COMBINE_TILE, window,
            num_warps=4,
        )  # fmt: skip

    def _has_tensor_cores(self, x: torch.Tensor) -> bool:
        """Whether Triton multiplies numbers of this dtype on them."""
        return self._capability >= TENSOR_CORES and x.dtype.itemsize == 2

    def _programs_at_once(self, shared_bytes: int) -> int:
        """How many programs the GPU runs at a time, each with so many bytes of shared memory."""
        return self._num_multiprocessors * max(1, min(MOST_PROGRAMS, self._shared_bytes // shared_bytes))


def _dequantise_transposed(matrix: QuantisedMatrix) -> torch.Tensor:
    """``[in, out]``, the inputs in the order of the codes."""
    inputs, columns = matrix.in_features, matrix.out_features
    dense = torch.empty((inputs, columns), dtype=matrix.dtype, device=matrix.codes.device)
    grid = cdiv(columns, DEQUANTISED_COLUMNS_TILE), cdiv(inputs, BLOCK_INPUTS)
    sizes = inputs, columns, matrix.group_size, matrix.runs is not None, DEQUANTISED_COLUMNS_TILE
    launch(dequantise_kernel, grid, *_quantised_tensors(matrix), dense, *sizes, num_warps=4)
    return dense


def _quantised_tensors(matrix: QuantisedMatrix) -> tuple[torch.Tensor | None, ...]:
    """As the kernels take them: without ``runs`` any tensor stands for these."""
    return matrix.codes, matrix.scales, matrix.zeros, matrix.codes if matrix.runs is None else matrix.runs


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *arguments: Any,
    num_warps: int,
    num_stages: int = 3,
    max_registers: int | None = None,
    fused: bool = True,
) -> None:
    """Every kernel of this module is launched here: what stands in for a GPU takes this function's place."""
    # Fused multiply-adds are explicit because Triton's default is about to change.
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": fused}
    kernel[grid](*arguments, **options, maxnreg=max_registers)


def _copy_blocks(pool: torch.Tensor, staging: torch.Tensor, blocks: torch.Tensor, gather: bool) -> None:
    if len(blocks):
        num_layers, num_blocks = pool.shape[:2]
        words = pool[0, 0].numel() * pool.dtype.itemsize // 4
        grid = (cdiv(words, COPY_WORDS_TILE), len(blocks), num_layers)
        tensors = pool.view(torch.int32), staging.view(torch.int32), blocks
        sizes = len(blocks), num_blocks, words, COPY_WORDS_TILE
        launch(copy_blocks_kernel, grid, *tensors, *sizes, gather, num_warps=4)


def _convert_blocks(kernel: Any, pool: torch.Tensor, staging: torch.Tensor, blocks: torch.Tensor) -> None:
    if len(blocks):
        num_layers, num_blocks, heads, _, block_size, head_dim = pool.shape
        grid = (len(blocks) * (block_size // TILE_TOKENS), heads, num_layers)
        tensors = pool, staging.view(torch.int32), staging.view(torch.float32), blocks
        sizes = len(blocks), num_blocks, head_dim, block_size, heads, next_power_of_2(head_dim)
        launch(kernel, grid, *tensors, *sizes, num_warps=4, fused=False)


def _row_stride(x: torch.Tensor) -> int:
    """Elements from one row to the next."""
    inner = 1
    for size, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if stride != inner and size > 1:
            raise ValueError(f"rows of shape {tuple(x.shape)}, strides {x.stride()} are not contiguous: make a copy")
        inner *= size
    return x.stride(0)


def _row_warps(elements: int) -> int:
    return min(max(1, elements // ELEMENTS_PER_WARP), MAX_WARPS)
