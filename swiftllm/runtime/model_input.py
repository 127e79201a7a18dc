"""What a batch computes: as plain values, which every rank gets, and as tensors on a rank's device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from swiftllm.core.plan import GpuBatchItem
from swiftllm.core.request import Request, Tier
from swiftllm.device import Device, Event
from swiftllm.engine.backend import AttentionFuture
from swiftllm.kv.block_pool import LayerGroups
from swiftllm.ops.interface import ChunkLens, ContextBlocks, StateChunk, StateRows
from swiftllm.sampling.sampler import PromptRows

# -- plain values ------------------------------------------------------------------------------------------------------
# What a GPU batch or a CPU batch computes, as plain values: numbers, lists, tuples and bytes.
#
# The process that schedules makes a description. Every rank makes tensors of it, without knowing the requests.

ALIGNED_IDS = 4
"""Each group's tables begin at 16 bytes: Triton compiles another kernel for other addresses."""
Chunk = tuple[int, int, list[list[int]]]
"""A prefill chunk: its first position, the tokens of its context, and its block table in each group of layers."""
Slots = Mapping[str, int]
"""Slots of states of linear attention by request id."""
Tables = Mapping[str, Sequence[int]]
"""Block ids by request id, in the order of :class:`~swiftllm.kv.block_pool.LayerGroups`."""


class GpuBatchInput(NamedTuple):
    """A GPU batch, row by row: prefills for the GPU tier, prefills for the CPU tier, decodes.

    ``sampling_rows`` get a token, ``scored_rows`` (first, last + 1) log-probabilities of the next token of the prompt.
    ``state_slots`` are those of the chunks and then of the decodes, in models with linear attention.
    """

    token_ids: list[int]
    positions: list[int]
    gpu_prefills: list[Chunk]
    cpu_prefills: list[Chunk]
    decode_lens: list[int]
    decode_tables: bytes  # int32 [groups, decodes, max_blocks]
    sampling_rows: list[int]
    scored_rows: list[tuple[int, int]]
    state_slots: list[int]  # of the chunks of both tiers, then of decodes: as their rows come


class CpuBatchInput(NamedTuple):
    """A CPU batch: the newest token of each request, the tokens of its context, and its block tables."""

    token_ids: list[int]
    lens: list[int]
    block_tables: bytes  # int32 [groups, rows, max_blocks]
    state_slots: list[int]


def gpu_batch_input(
    items: Sequence[GpuBatchItem], tables: Tables, groups: LayerGroups, slots: Slots | None = None
) -> tuple[GpuBatchInput, list[Request], list[PromptRows]]:
    """The GPU batch, the requests of its ``sampling_rows``, and what its ``scored_rows`` are for."""
    chunks = [item for item in items if item.is_prefill]
    decodes = [item for item in items if not item.is_prefill] if chunks else items
    of_tier = {tier: [item for item in chunks if item.tier is tier] for tier in Tier}
    token_ids, positions, sampling_rows, sampling_requests, prompts = [], [], [], [], []
    for item in (*of_tier[Tier.GPU], *of_tier[Tier.CPU]):
        if item.request.sampling.prompt_logprobs is not None:
            prompts += _prompt_rows(item, len(token_ids))
        token_ids += item.request.token_ids(item.start, item.context_len)
        positions += range(item.start, item.context_len)
        if item.samples:
            sampling_rows.append(len(token_ids) - 1)
            sampling_requests.append(item.request)
    decoding, lens = [], []
    for request, start, _, tier, _ in decodes:  # up to a thousand, in each iteration, while the GPU waits
        if tier is Tier.CPU:
            raise ValueError(f"request {request.request_id} decodes from the CPU tier: it belongs in a CPU batch")
        decoding.append(request)
        positions.append(start)
        lens.append(start + 1)
        token_ids += request.token_ids(start, start + 1)
    sampling_rows += range(len(token_ids) - len(decoding), len(token_ids))
    description = GpuBatchInput(
        token_ids=token_ids,
        positions=positions,
        gpu_prefills=[_chunk(item, tables, groups) for item in of_tier[Tier.GPU]],
        cpu_prefills=[_chunk(item, tables, groups) for item in of_tier[Tier.CPU]],
        decode_lens=lens,
        decode_tables=_block_tables(decoding, lens, tables, groups),
        sampling_rows=sampling_rows,
        scored_rows=[(prompt.rows.start, prompt.rows.stop) for prompt in prompts],
        state_slots=_slots_of((item.request for item in (*of_tier[Tier.GPU], *of_tier[Tier.CPU], *decodes)), slots),
    )
    return description, sampling_requests + decoding, prompts


def cpu_batch_input(
    requests: Sequence[Request], tables: Tables, groups: LayerGroups, slots: Slots | None = None
) -> CpuBatchInput:
    lens = [request.num_tokens for request in requests]
    token_ids = [t for request, n in zip(requests, lens, strict=True) for t in request.token_ids(n - 1, n)]
    return CpuBatchInput(token_ids, lens, _block_tables(requests, lens, tables, groups), _slots_of(requests, slots))


def _slots_of(requests: Iterable[Request], slots: Slots | None) -> list[int]:
    return [] if slots is None else [slots[request.request_id] for request in requests]


def _chunk(item: GpuBatchItem, tables: Tables, groups: LayerGroups) -> Chunk:
    return item.start, item.context_len, _tables_of([item.request], [item.context_len], tables, groups)[:, 0].tolist()


def _block_tables(requests: Iterable[Request], lens: list[int], tables: Tables, groups: LayerGroups) -> bytes:
    found = _tables_of(requests, lens, tables, groups)
    if len(found) > 1:
        found = np.pad(found, ((0, 0), (0, 0), (0, -found.shape[2] % ALIGNED_IDS)))
    return found.tobytes()


def _tables_of(requests: Iterable[Request], lens: list[int], tables: Tables, groups: LayerGroups) -> np.ndarray:
    return groups.tables([tables[request.request_id] for request in requests], lens)


def _prompt_rows(item: GpuBatchItem, first_row: int) -> list[PromptRows]:
    """Rows of a chunk that give log-probabilities the request lacks; the chunk begins at ``first_row``. Output tokens
    got theirs when they were sampled."""
    request = item.request
    start = max(item.start, len(request.prompt_logprobs))
    stop = min(item.context_len, request.prompt_len - 1)
    if start >= stop:
        return []
    rows = slice(first_row + start - item.start, first_row + stop - item.start)
    return [PromptRows(request, rows, tuple(request.prompt_token_ids[start + 1 : stop + 1]))]


# -- tensors -----------------------------------------------------------------------------------------------------------
# GPU batches and CPU batches as tensors. What is the same in all layers is made once, when they open.
#
# A batch is opened in two halves: requests and block tables become a description of plain values
# (:mod:`swiftllm.runtime.model_input`), and the description becomes tensors on the device.


@dataclass(eq=False)
class Rows:
    """One row per token. Between two stages a batch holds ``residual``, and ``qkv`` or ``attention_out``; all are
    on the device.

    ``sampling_rows`` (None: all) are the rows that get a token at the last stage, for ``sampling_requests``. A rank
    that chooses no tokens has no requests.
    """

    token_ids: torch.Tensor  # int64 [rows]
    rotary_rows: torch.Tensor  # float32 [rows, 2, head_dim]
    attention_out: torch.Tensor  # [rows, num_heads, head_dim]
    sampling_rows: torch.Tensor | None
    sampling_requests: list[Request] = field(default_factory=list, kw_only=True)
    residual: torch.Tensor | None = None  # [rows, hidden_size], of the model's residual_dtype
    qkv: torch.Tensor | None = None  # [rows, num_heads + 2 num_kv_heads, head_dim], gates before them in some models
    state_rows: StateRows | None = None  # in models with linear attention

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_samples(self) -> int:
        """Rows that get a token."""
        return self.num_rows if self.sampling_rows is None else self.sampling_rows.shape[0]


@dataclass(frozen=True)
class PrefillCall:
    """Consecutive chunks of a tier whose attention, in the layers of a group, is one call.

    ``contexts`` is where the tier has the tokens that the chunks attend to; None where they attend to themselves alone.
    With ``has_own`` these include the chunks' own.
    """

    rows: slice
    lens: ChunkLens
    contexts: ContextBlocks | None = None
    has_own: bool = False


@dataclass(frozen=True)
class StoredRows:
    """The GPU batch's rows that a tier keeps in the layers of a group, and their slots, on the tier's device."""

    rows: slice | torch.Tensor  # the latter int64, on the device
    blocks: torch.Tensor  # int64 [rows]
    offsets: torch.Tensor  # int64 [rows]


@dataclass
class ContextLoad:
    """K and V of the earlier tokens of a call's chunks, on their way from the CPU tier to the device: ``parts [2,
    num_kv_heads, tokens, head_dim]`` of each, there once the ``futures`` are ready and then the ``events`` pass."""

    layer: int
    call: int
    parts: list[torch.Tensor]
    futures: list[AttentionFuture] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


@dataclass
class PrefillGroup:
    """All prefill chunks of one tier: in each group of layers, what is ``stored`` and the ``calls`` of attention.
    ``load`` brings the contexts of the call that comes next, where they come from the CPU tier."""

    tier: Tier
    stored: Sequence[StoredRows]
    calls: Sequence[Sequence[PrefillCall]]
    load: ContextLoad | None = None


@dataclass
class DecodeGroup:
    rows: slice
    block_tables: torch.Tensor  # int32 [groups, rows, max_blocks]
    seq_lens: torch.Tensor  # int32 [rows]


@dataclass(eq=False)
class GpuBatchTensors(Rows):
    """Rows are ordered prefills to the GPU tier, prefills to the CPU tier, decodes.

    ``scored_rows`` give log-probabilities of prompts, which go to the requests of ``prompts``.
    """

    prefills: tuple[PrefillGroup, ...] = ()
    decodes: DecodeGroup | None = None
    scored_rows: tuple[slice, ...] = ()
    prompts: tuple[PromptRows, ...] = ()


@dataclass(eq=False, kw_only=True)
class CpuBatchTensors(Rows):
    """One row per request. The CPU tier reads tables and lengths and writes ``host_out``, all in host memory. The
    result is then copied to ``attention_out``, where it is after ``returned``. ``opened`` is what the CPU tier makes of
    tables and lengths, for each group of layers, before the first attention."""

    block_tables: torch.Tensor  # int32 [groups, rows, max_blocks]
    seq_lens: torch.Tensor  # int32 [rows]
    host_out: torch.Tensor  # as attention_out, which it is itself where the device is the host
    opened: Sequence[Any] = ()
    returned: Event | None = None

    def rows_without(self, request_ids: Collection[str]) -> list[int]:
        """The rows of all other requests."""
        return [row for row, r in enumerate(self.sampling_requests) if r.request_id not in request_ids]


@dataclass(frozen=True)
class BatchBuilder:
    """Makes batches of descriptions. ``rotary_table`` float32 ``[positions, 2, head_dim]`` is on ``device``."""

    device: Device
    dtype: torch.dtype
    layer_groups: LayerGroups
    num_heads: int
    rotary_table: torch.Tensor

    @property
    def block_size(self) -> int:
        return self.layer_groups.block_size

    def open_gpu_batch(self, gpu_batch: GpuBatchInput) -> GpuBatchTensors:
        prefills, first_row = [], 0
        for tier, chunks in ((Tier.GPU, gpu_batch.gpu_prefills), (Tier.CPU, gpu_batch.cpu_prefills)):
            if chunks:
                prefills.append(self._prefill_group(tier, chunks, first_row))
                first_row += sum(context_len - start for start, context_len, _ in chunks)
        num_rows, decodes = len(gpu_batch.token_ids), None
        if gpu_batch.decode_lens:
            block_tables = self._upload(self._tables(gpu_batch.decode_tables, len(gpu_batch.decode_lens)))
            seq_lens = self._upload(torch.tensor(gpu_batch.decode_lens, dtype=torch.int32))
            decodes = DecodeGroup(slice(first_row, num_rows), block_tables, seq_lens)
        is_all = len(gpu_batch.sampling_rows) == num_rows
        return GpuBatchTensors(
            token_ids=self._upload(torch.tensor(gpu_batch.token_ids, dtype=torch.int64)),
            rotary_rows=self._rotary_rows(gpu_batch.positions),
            attention_out=torch.empty(self._out_shape(num_rows), dtype=self.dtype, device=self.device.torch_device),
            sampling_rows=None if is_all else self._upload(torch.tensor(gpu_batch.sampling_rows, dtype=torch.int64)),
            prefills=tuple(prefills),
            decodes=decodes,
            scored_rows=tuple(slice(*rows) for rows in gpu_batch.scored_rows),
            state_rows=self._state_rows(gpu_batch.state_slots, [*gpu_batch.gpu_prefills, *gpu_batch.cpu_prefills]),
        )

    def open_cpu_batch(self, cpu_batch: CpuBatchInput) -> CpuBatchTensors:
        host_out = self.device.pinned(self._out_shape(len(cpu_batch.lens)), self.dtype)
        return CpuBatchTensors(
            token_ids=self._upload(torch.tensor(cpu_batch.token_ids, dtype=torch.int64)),
            rotary_rows=self._rotary_rows([n - 1 for n in cpu_batch.lens]),
            attention_out=self.device.mirror(host_out),
            sampling_rows=None,
            block_tables=self._tables(cpu_batch.block_tables, len(cpu_batch.lens)),
            seq_lens=torch.tensor(cpu_batch.lens, dtype=torch.int32),
            host_out=host_out,
            state_rows=self._state_rows(cpu_batch.state_slots),
        )

    def keep_rows(self, cpu_batch: CpuBatchTensors, kept: Sequence[int]) -> CpuBatchTensors:
        """The CPU batch with some of its rows. No attention of it may be under way."""
        index = torch.tensor(kept, dtype=torch.int64)
        on_device = self._upload(index)

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.index_select(0, on_device)

        host_out, states = self.device.pinned(self._out_shape(len(kept)), self.dtype), cpu_batch.state_rows
        attention_out = self.device.mirror(host_out)
        return CpuBatchTensors(
            token_ids=keep(cpu_batch.token_ids),
            rotary_rows=keep(cpu_batch.rotary_rows),
            attention_out=torch.index_select(cpu_batch.attention_out, 0, on_device, out=attention_out),
            sampling_rows=None,
            sampling_requests=[cpu_batch.sampling_requests[row] for row in kept] if cpu_batch.sampling_requests else [],
            residual=None if cpu_batch.residual is None else keep(cpu_batch.residual),
            qkv=None if cpu_batch.qkv is None else keep(cpu_batch.qkv),
            state_rows=None if states is None else StateRows((), keep(states.decode_slots)),
            block_tables=cpu_batch.block_tables.index_select(1, index),
            seq_lens=cpu_batch.seq_lens.index_select(0, index),
            host_out=host_out,
        )

    def _state_rows(self, slots: Sequence[int], chunks: Sequence[Chunk] = ()) -> StateRows | None:
        if not slots:
            return None
        of_chunks, of_decodes = slots[: len(chunks)], slots[len(chunks) :]
        known = [
            StateChunk(slot, context_len - start, is_first=start == 0)
            for slot, (start, context_len, _) in zip(of_chunks, chunks, strict=True)
        ]
        return StateRows.of(known, of_decodes, self._upload)

    def _upload(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.device.compute.send(tensor)

    def _out_shape(self, num_rows: int) -> tuple[int, int, int]:
        return num_rows, self.num_heads, self.rotary_table.shape[-1]

    def _rotary_rows(self, positions: list[int]) -> torch.Tensor:
        return self.rotary_table[self._upload(torch.tensor(positions, dtype=torch.int64))]

    def _tables(self, values: bytes, rows: int) -> torch.Tensor:
        """Block tables of a description: int32 ``[groups, rows, max_blocks]``."""
        tables = np.frombuffer(values, dtype=np.int32)
        groups = len(self.layer_groups.windows)
        return torch.from_numpy(tables.reshape(groups, rows, tables.size // (groups * max(1, rows))).copy())

    def _prefill_group(self, tier: Tier, items: Sequence[Chunk], first_row: int) -> PrefillGroup:
        """``first_row``: the GPU batch's row where the group begins."""
        at_tier = self._upload if tier is Tier.GPU else lambda tensor: tensor
        row = first_row + sum(context_len - start for start, context_len, _ in items)
        stored = []
        for group in range(len(self.layer_groups.windows)):
            blocks, positions, kept = [], [], []
            for start, context_len, tables in items:
                held = torch.arange(start, context_len)
                kept.append(held >= self.layer_groups.first_kept(group, context_len))
                positions.append(held[kept[-1]])
                blocks.append(torch.tensor(tables[group], dtype=torch.int64)[positions[-1] // self.block_size])
            is_kept = torch.cat(kept)
            rows = slice(first_row, row) if is_kept.all() else self._upload(first_row + is_kept.nonzero()[:, 0])
            slots = torch.cat(blocks), torch.cat(positions) % self.block_size
            stored.append(StoredRows(rows, *map(at_tier, slots)))
        groups = range(len(self.layer_groups.windows))
        return PrefillGroup(tier, stored, [self._calls(group, tier, items, first_row, at_tier) for group in groups])

    def _calls(
        self,
        group: int,
        tier: Tier,
        items: Sequence[Chunk],
        first_row: int,
        at_tier: Callable[[torch.Tensor], torch.Tensor],
    ) -> list[PrefillCall]:
        """Contexts of one call have no more tokens than the longest request: they are gathered side by side."""
        window, size = self.layer_groups.windows[group], self.block_size
        is_host = self.device.torch_device.type == "cpu"  # gains nothing by many contexts in one call, and copies more
        most_tokens = 0 if is_host else len(self.rotary_table)
        # A ring's blocks are gathered before a chunk overwrites them; the CPU tier gets its tokens from the host.
        has_own = window is None and tier is Tier.GPU
        runs: list[list[tuple[int, int, int, Sequence[int]]]] = []  # of (first token reached, start, end, block table)
        tokens, had_context = 0, None
        for start, end, tables in items:
            first = self.layer_groups.first_reached(group, start)
            tokens += end - first
            if (first < start) != had_context or (had_context and tokens > most_tokens):
                runs.append([])
                tokens, had_context = end - first, first < start
            runs[-1].append((first, start, end, tables[group]))
        calls, row = [], first_row
        for run in runs:
            rows = slice(row, row + sum(end - start for _, start, end, _ in run))
            lens = ChunkLens.of(
                [end - start for _, start, end, _ in run], [end - first for first, _, end, _ in run], self._upload
            )
            row = rows.stop
            if all(first == start for first, start, _, _ in run):
                calls.append(PrefillCall(rows, lens))
                continue
            spans = [(first, end if has_own else start) for first, start, end, _ in run]
            blocks = [
                table[first // size : -(-last // size)]
                for (first, last), (_, _, _, table) in zip(spans, run, strict=True)
            ]
            contexts = ContextBlocks.of(blocks, [last - first for first, last in spans], size, at_tier)
            calls.append(PrefillCall(rows, lens, contexts, has_own))
        return calls
