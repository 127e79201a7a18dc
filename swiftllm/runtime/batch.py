"""Lanes and cohorts as tensors. What is the same in all layers is made once, when they open.

A batch is opened in two halves: requests and block tables become a description of plain values
(:mod:`swiftllm.runtime.description`), and the description becomes tensors on the device.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from swiftllm.core.request import Request, Tier
from swiftllm.device.device import Device, Event
from swiftllm.kv.layer_groups import LayerGroups
from swiftllm.runtime.description import Chunk, CohortDescription, LaneDescription
from swiftllm.runtime.kv_transfers import LoadedContext
from swiftllm.sampling.logprobs import PromptRows


@dataclass(eq=False)
class Rows:
    """One row per token. Between two boundaries a batch holds ``residual``, and ``qkv`` or ``attention_out``; all are
    on the device.

    ``sampling_rows`` (None: all) are the rows that get a token at the last boundary, for ``sampling_requests``. A rank
    that chooses no tokens has no requests.
    """

    token_ids: torch.Tensor  # int64 [rows]
    rotary_rows: torch.Tensor  # float32 [rows, 2, head_dim]
    attention_out: torch.Tensor  # [rows, num_heads, head_dim]
    sampling_rows: torch.Tensor | None
    sampling_requests: list[Request] = field(default_factory=list, kw_only=True)
    residual: torch.Tensor | None = None  # [rows, hidden_size]
    qkv: torch.Tensor | None = None  # [rows, num_heads + 2 num_kv_heads, head_dim]

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_samples(self) -> int:
        """Rows that get a token."""
        return self.num_rows if self.sampling_rows is None else self.sampling_rows.shape[0]


@dataclass(frozen=True)
class EarlierContext:
    """The ``num_tokens`` before a chunk that it attends to in the layers of a group. ``blocks``, on the tier's device,
    hold them, and where ``has_chunk`` the chunk's own tokens too. ``mask`` is that of these tokens and the chunk's."""

    num_tokens: int
    blocks: torch.Tensor  # int64
    has_chunk: bool
    mask: torch.Tensor  # bool [rows, num_tokens + rows], on the device


@dataclass
class PrefillChunk:
    """Rows of one request. ``contexts``: for each group of layers; None where the chunk attends to itself. ``earlier``
    is the earlier context in layer ``earlier_layer``, the next to come, where it comes from the CPU tier.
    """

    rows: slice
    contexts: Sequence[EarlierContext | None]
    earlier: LoadedContext | None = None
    earlier_layer: int | None = None


@dataclass(frozen=True)
class StoredRows:
    """The lane's rows that a tier keeps in the layers of a group, and their slots, on the tier's device."""

    rows: slice | torch.Tensor  # the latter int64, on the device
    blocks: torch.Tensor  # int64 [rows]
    offsets: torch.Tensor  # int64 [rows]


@dataclass
class PrefillGroup:
    """All prefill chunks of one tier; what is ``stored`` in each group of layers."""

    tier: Tier
    stored: Sequence[StoredRows]
    chunks: list[PrefillChunk]


@dataclass
class DecodeGroup:
    rows: slice
    block_tables: torch.Tensor  # int32 [groups, rows, max_blocks]
    seq_lens: torch.Tensor  # int32 [rows]


@dataclass(eq=False)
class LaneBatch(Rows):
    """Rows are ordered prefills to the GPU tier, prefills to the CPU tier, decodes.

    ``scored_rows`` give log-probabilities of prompts, which go to the requests of ``prompts``.
    """

    prefills: tuple[PrefillGroup, ...] = ()
    decodes: DecodeGroup | None = None
    scored_rows: tuple[slice, ...] = ()
    prompts: tuple[PromptRows, ...] = ()


@dataclass(eq=False, kw_only=True)
class CohortBatch(Rows):
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

    def open_lane(self, lane: LaneDescription) -> LaneBatch:
        prefills, first_row = [], 0
        for tier, chunks in ((Tier.GPU, lane.gpu_prefills), (Tier.CPU, lane.cpu_prefills)):
            if chunks:
                prefills.append(self._prefill_group(tier, chunks, first_row))
                first_row = prefills[-1].chunks[-1].rows.stop
        num_rows, decodes = len(lane.token_ids), None
        if lane.decode_lens:
            block_tables = self._upload(self._tables(lane.decode_tables, len(lane.decode_lens)))
            seq_lens = self._upload(torch.tensor(lane.decode_lens, dtype=torch.int32))
            decodes = DecodeGroup(slice(first_row, num_rows), block_tables, seq_lens)
        is_all = len(lane.sampling_rows) == num_rows
        return LaneBatch(
            **self._rows(lane.token_ids, lane.positions),
            attention_out=torch.empty(self._out_shape(num_rows), dtype=self.dtype, device=self.device.torch_device),
            sampling_rows=None if is_all else self._upload(torch.tensor(lane.sampling_rows, dtype=torch.int64)),
            prefills=tuple(prefills),
            decodes=decodes,
            scored_rows=tuple(slice(*rows) for rows in lane.scored_rows),
        )

    def open_cohort(self, cohort: CohortDescription) -> CohortBatch:
        host_out = self.device.pinned(self._out_shape(len(cohort.lens)), self.dtype)
        return CohortBatch(
            **self._rows(cohort.token_ids, [n - 1 for n in cohort.lens]),
            attention_out=self.device.mirror(host_out),
            sampling_rows=None,
            block_tables=self._tables(cohort.block_tables, len(cohort.lens)),
            seq_lens=torch.tensor(cohort.lens, dtype=torch.int32),
            host_out=host_out,
        )

    def keep_rows(self, cohort: CohortBatch, kept: Sequence[int]) -> CohortBatch:
        """The cohort with some of its rows. No attention of it may be under way."""
        index = torch.tensor(kept, dtype=torch.int64)
        on_device = self._upload(index)

        def keep(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.index_select(0, on_device)

        host_out = self.device.pinned(self._out_shape(len(kept)), self.dtype)
        attention_out = self.device.mirror(host_out)
        return CohortBatch(
            token_ids=keep(cohort.token_ids),
            rotary_rows=keep(cohort.rotary_rows),
            attention_out=torch.index_select(cohort.attention_out, 0, on_device, out=attention_out),
            sampling_rows=None,
            sampling_requests=[cohort.sampling_requests[row] for row in kept] if cohort.sampling_requests else [],
            residual=keep(cohort.residual),
            qkv=keep(cohort.qkv),
            block_tables=cohort.block_tables.index_select(1, index),
            seq_lens=cohort.seq_lens.index_select(0, index),
            host_out=host_out,
        )

    def _upload(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.device.compute.send(tensor)

    def _out_shape(self, num_rows: int) -> tuple[int, int, int]:
        return num_rows, self.num_heads, self.rotary_table.shape[-1]

    def _rows(self, token_ids: list[int], positions: list[int]) -> dict[str, torch.Tensor]:
        return {
            "token_ids": self._upload(torch.tensor(token_ids, dtype=torch.int64)),
            "rotary_rows": self.rotary_table[self._upload(torch.tensor(positions, dtype=torch.int64))],
        }

    def _tables(self, values: bytes, rows: int) -> torch.Tensor:
        """Block tables of a description: int32 ``[groups, rows, max_blocks]``."""
        tables = np.frombuffer(values, dtype=np.int32)
        groups = len(self.layer_groups.windows)
        return torch.from_numpy(tables.reshape(groups, rows, tables.size // (groups * max(1, rows))).copy())

    def _prefill_group(self, tier: Tier, items: Sequence[Chunk], first_row: int) -> PrefillGroup:
        """``first_row``: the lane's row where the group begins."""
        at_tier = self._upload if tier is Tier.GPU else lambda tensor: tensor
        row, chunks = first_row, []
        for start, context_len, tables in items:
            rows = slice(row, row + context_len - start)
            contexts = [self._context(group, tier, start, context_len, table) for group, table in enumerate(tables)]
            chunks.append(PrefillChunk(rows, contexts))
            row = rows.stop
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
        return PrefillGroup(tier, stored, chunks)

    def _context(
        self, group: int, tier: Tier, start: int, context_len: int, table: Sequence[int]
    ) -> EarlierContext | None:
        """What a chunk from ``start`` to ``context_len`` attends to in a group of layers; None: itself alone."""
        window, size = self.layer_groups.windows[group], self.block_size
        first = self.layer_groups.first_reached(group, start)
        if first == start:
            return None
        # A ring's blocks are gathered before the chunk overwrites them; the CPU tier gets its tokens from the host.
        has_chunk = window is None and tier is Tier.GPU
        blocks = torch.tensor(table[first // size : -(-(context_len if has_chunk else start) // size)])
        rows, columns = torch.arange(start, context_len)[:, None], torch.arange(first, context_len)
        mask = columns <= rows
        if window is not None:
            mask &= columns > rows - window
        at_tier = self._upload(blocks) if tier is Tier.GPU else blocks
        return EarlierContext(start - first, at_tier, has_chunk, self._upload(mask))


def concatenate(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
