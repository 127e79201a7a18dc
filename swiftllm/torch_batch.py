"""Lanes and cohorts as tensors: what stays the same while they cross the layers is made once, when they open."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from swiftllm.plan import LaneItem
from swiftllm.request import Request, Tier


@dataclass
class Rows:
    """One row per token. Between two boundaries a batch holds ``residual``, and q, k, v or ``attention_out``.

    ``sampling_rows`` (None: all) are the rows that get a token at the last boundary, for ``sampling_requests``.
    """

    token_ids: torch.Tensor  # int64 [rows]
    rotary_rows: torch.Tensor  # float32 [rows, 2, head_dim]
    attention_out: torch.Tensor  # [rows, num_heads, head_dim]; a cohort's is in host memory
    sampling_rows: torch.Tensor | None
    sampling_requests: list[Request]
    residual: torch.Tensor | None = None
    q: torch.Tensor | None = None
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]


@dataclass
class PrefillChunk:
    """Rows of one request. With earlier context, ``blocks`` (on the tier's device) and ``mask`` say where and what."""

    rows: slice
    context_len: int
    blocks: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass
class PrefillGroup:
    """All prefill chunks of one tier: adjacent rows, and the slot of each on the tier's device."""

    tier: Tier
    rows: slice
    blocks: torch.Tensor  # int64 [rows]
    offsets: torch.Tensor  # int64 [rows]
    chunks: list[PrefillChunk]


@dataclass
class DecodeGroup:
    rows: slice
    block_tables: torch.Tensor  # int32 [rows, max_blocks]
    seq_lens: torch.Tensor  # int32 [rows]


@dataclass
class Lane(Rows):
    """Rows are ordered prefills to the GPU tier, prefills to the CPU tier, decodes."""

    prefills: tuple[PrefillGroup, ...] = ()
    decodes: DecodeGroup | None = None


@dataclass
class Cohort(Rows):
    """One row per request; the tables live in host memory."""

    block_tables: torch.Tensor | None = None  # int32 [rows, max_blocks]
    seq_lens: torch.Tensor | None = None  # int32 [rows]

    def without(self, request_ids: frozenset[str]) -> Cohort:
        kept = [row for row, r in enumerate(self.sampling_requests) if r.request_id not in request_ids]
        index = torch.tensor(kept, dtype=torch.int64)

        def keep(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.index_select(0, index.to(tensor.device))

        return Cohort(
            token_ids=keep(self.token_ids),
            rotary_rows=keep(self.rotary_rows),
            attention_out=keep(self.attention_out),
            sampling_rows=None,
            sampling_requests=[self.sampling_requests[row] for row in kept],
            residual=keep(self.residual),
            q=keep(self.q),
            k=keep(self.k),
            v=keep(self.v),
            block_tables=keep(self.block_tables),
            seq_lens=keep(self.seq_lens),
        )


@dataclass(frozen=True)
class BatchBuilder:
    """Opens lanes and cohorts. ``rotary_table`` float32 ``[positions, 2, head_dim]`` is on ``device``."""

    device: torch.device
    dtype: torch.dtype
    block_size: int
    num_heads: int
    rotary_table: torch.Tensor

    def open_lane(self, items: Sequence[LaneItem], tables: Mapping[str, Sequence[int]]) -> Lane:
        stray = next((i for i in items if not i.is_prefill and i.tier is Tier.CPU), None)
        if stray is not None:
            raise ValueError(f"request {stray.request.request_id} decodes from the CPU tier: it belongs in a cohort")
        prefill_items = [item for tier in Tier for item in items if item.is_prefill and item.tier is tier]
        decode_items = [item for item in items if not item.is_prefill]
        items = prefill_items + decode_items
        token_ids = [t for item in items for t in item.request.token_ids(item.start, item.context_len)]
        positions = [p for item in items for p in range(item.start, item.context_len)]
        sampling, num_rows = [], 0
        for item in items:
            num_rows += item.num_tokens
            if item.samples:
                sampling.append((num_rows - 1, item.request))

        groups, first_row = [], 0
        for tier, run in groupby(prefill_items, key=lambda item: item.tier):
            groups.append(self._prefill_group(tier, list(run), first_row, tables))
            first_row = groups[-1].rows.stop
        decodes = None
        if decode_items:
            lens = [item.context_len for item in decode_items]
            block_tables = self._block_tables((item.request for item in decode_items), lens, tables)
            seq_lens = torch.tensor(lens, dtype=torch.int32)
            rows = slice(first_row, num_rows)
            decodes = DecodeGroup(rows, block_tables.to(self.device), seq_lens.to(self.device))
        is_all = len(sampling) == num_rows
        return Lane(
            **self._rows(token_ids, positions, self.device),
            sampling_rows=None
            if is_all
            else torch.tensor([row for row, _ in sampling], dtype=torch.int64).to(self.device),
            sampling_requests=[request for _, request in sampling],
            prefills=tuple(groups),
            decodes=decodes,
        )

    def open_cohort(self, requests: Sequence[Request], tables: Mapping[str, Sequence[int]]) -> Cohort:
        lens = [request.num_tokens for request in requests]
        token_ids = [t for request, n in zip(requests, lens, strict=True) for t in request.token_ids(n - 1, n)]
        return Cohort(
            **self._rows(token_ids, [n - 1 for n in lens], torch.device("cpu")),
            sampling_rows=None,
            sampling_requests=list(requests),
            block_tables=self._block_tables(requests, lens, tables),
            seq_lens=torch.tensor(lens, dtype=torch.int32),
        )

    def _rows(self, token_ids: list[int], positions: list[int], out_device: torch.device) -> dict[str, torch.Tensor]:
        rotary_rows = self.rotary_table[torch.tensor(positions, dtype=torch.int64).to(self.device)]
        shape = (len(token_ids), self.num_heads, self.rotary_table.shape[-1])
        return {
            "token_ids": torch.tensor(token_ids, dtype=torch.int64).to(self.device),
            "rotary_rows": rotary_rows,
            "attention_out": torch.empty(shape, dtype=self.dtype, device=out_device),
        }

    def _prefill_group(
        self, tier: Tier, items: list[LaneItem], first_row: int, tables: Mapping[str, Sequence[int]]
    ) -> PrefillGroup:
        """``first_row``: where the group's rows begin in the lane."""
        device = self.device if tier is Tier.GPU else torch.device("cpu")
        row, chunks, row_blocks, row_offsets = first_row, [], [], []
        for item in items:
            rows = slice(row, row + item.num_tokens)
            row = rows.stop
            num_blocks = -(-item.context_len // self.block_size)
            blocks = torch.tensor(tables[item.request.request_id][:num_blocks], dtype=torch.int64)
            positions = torch.arange(item.start, item.context_len)
            row_blocks.append(blocks[positions // self.block_size])
            row_offsets.append(positions % self.block_size)
            if item.start == 0:
                chunks.append(PrefillChunk(rows, item.context_len, None, None))
            else:
                mask = torch.arange(item.context_len) <= positions[:, None]
                chunks.append(PrefillChunk(rows, item.context_len, blocks.to(device), mask.to(self.device)))
        return PrefillGroup(
            tier,
            slice(first_row, row),
            torch.cat(row_blocks).to(device),
            torch.cat(row_offsets).to(device),
            chunks,
        )

    def _block_tables(
        self, requests: Iterable[Request], lens: list[int], tables: Mapping[str, Sequence[int]]
    ) -> torch.Tensor:
        counts = [-(-n // self.block_size) for n in lens]
        table = np.zeros((len(lens), max(counts, default=0)), dtype=np.int32)
        for row, (request, count) in enumerate(zip(requests, counts, strict=True)):
            table[row, :count] = tables[request.request_id][:count]
        return torch.from_numpy(table)
