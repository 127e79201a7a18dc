"""Lanes and cohorts as tensors. What is the same in all layers is made once, when they open."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from swiftllm.core.plan import LaneItem
from swiftllm.core.request import Request, Tier
from swiftllm.device.device import Device, Event
from swiftllm.sampling.logprobs import PromptRows


@dataclass(eq=False)
class Rows:
    """One row per token. Between two boundaries a batch holds ``residual``, and ``qkv`` or ``attention_out``; all are
    on the device.

    ``sampling_rows`` (None: all) are the rows that get a token at the last boundary, for ``sampling_requests``.
    """

    token_ids: torch.Tensor  # int64 [rows]
    rotary_rows: torch.Tensor  # float32 [rows, 2, head_dim]
    attention_out: torch.Tensor  # [rows, num_heads, head_dim]
    sampling_rows: torch.Tensor | None
    sampling_requests: list[Request]
    residual: torch.Tensor | None = None  # [rows, hidden_size]
    qkv: torch.Tensor | None = None  # [rows, num_heads + 2 num_kv_heads, head_dim]

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]


@dataclass
class PrefillChunk:
    """Rows of one request. With earlier context ``blocks``, on the tier's device, hold the
    context and ``mask`` is its attention mask."""

    rows: slice
    context_len: int
    blocks: torch.Tensor | None
    mask: torch.Tensor | None

    @property
    def start(self) -> int:
        """Tokens of earlier chunks."""
        return self.context_len - (self.rows.stop - self.rows.start)


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


@dataclass(eq=False)
class LaneBatch(Rows):
    """Rows are ordered prefills to the GPU tier, prefills to the CPU tier, decodes."""

    prefills: tuple[PrefillGroup, ...] = ()
    decodes: DecodeGroup | None = None
    prompts: tuple[PromptRows, ...] = ()


@dataclass(eq=False, kw_only=True)
class CohortBatch(Rows):
    """One row per request. The CPU worker reads tables and lengths and writes ``host_out``, all in host memory. The
    result is then copied to ``attention_out``, where it is after ``returned``."""

    block_tables: torch.Tensor  # int32 [rows, max_blocks]
    seq_lens: torch.Tensor  # int32 [rows]
    host_out: torch.Tensor  # as attention_out, which it is itself where the device is the host
    returned: Event | None = None


@dataclass(frozen=True)
class BatchBuilder:
    """Opens lanes and cohorts. ``rotary_table`` float32 ``[positions, 2, head_dim]`` is on ``device``."""

    device: Device
    dtype: torch.dtype
    block_size: int
    num_heads: int
    rotary_table: torch.Tensor

    def open_lane(self, items: Sequence[LaneItem], tables: Mapping[str, Sequence[int]]) -> LaneBatch:
        stray = next((i for i in items if not i.is_prefill and i.tier is Tier.CPU), None)
        if stray is not None:
            raise ValueError(f"request {stray.request.request_id} decodes from the CPU tier: it belongs in a cohort")
        prefill_items = [item for tier in Tier for item in items if item.is_prefill and item.tier is tier]
        decode_items = [item for item in items if not item.is_prefill]
        items = prefill_items + decode_items
        token_ids = [t for item in items for t in item.request.token_ids(item.start, item.context_len)]
        positions = [p for item in items for p in range(item.start, item.context_len)]
        sampling, prompts, num_rows = [], [], 0
        for item in items:
            if item.is_prefill and item.request.sampling.prompt_logprobs is not None:
                prompts += _prompt_rows(item, num_rows)
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
            decodes = DecodeGroup(rows, self._upload(block_tables), self._upload(seq_lens))
        is_all = len(sampling) == num_rows
        sampling_rows = torch.tensor([row for row, _ in sampling], dtype=torch.int64)
        return LaneBatch(
            **self._rows(token_ids, positions),
            attention_out=torch.empty(
                self._out_shape(len(token_ids)), dtype=self.dtype, device=self.device.torch_device
            ),
            sampling_rows=None if is_all else self._upload(sampling_rows),
            sampling_requests=[request for _, request in sampling],
            prefills=tuple(groups),
            decodes=decodes,
            prompts=tuple(prompts),
        )

    def open_cohort(self, requests: Sequence[Request], tables: Mapping[str, Sequence[int]]) -> CohortBatch:
        lens = [request.num_tokens for request in requests]
        token_ids = [t for request, n in zip(requests, lens, strict=True) for t in request.token_ids(n - 1, n)]
        host_out = self.device.pinned(self._out_shape(len(requests)), self.dtype)
        return CohortBatch(
            **self._rows(token_ids, [n - 1 for n in lens]),
            attention_out=self.device.mirror(host_out),
            sampling_rows=None,
            sampling_requests=list(requests),
            block_tables=self._block_tables(requests, lens, tables),
            seq_lens=torch.tensor(lens, dtype=torch.int32),
            host_out=host_out,
        )

    def drop_rows(self, cohort: CohortBatch, request_ids: frozenset[str]) -> CohortBatch:
        """The cohort without some of its requests. No attention of it may be under way."""
        kept = [row for row, r in enumerate(cohort.sampling_requests) if r.request_id not in request_ids]
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
            sampling_requests=[cohort.sampling_requests[row] for row in kept],
            residual=keep(cohort.residual),
            qkv=keep(cohort.qkv),
            block_tables=cohort.block_tables.index_select(0, index),
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

    def _prefill_group(
        self, tier: Tier, items: list[LaneItem], first_row: int, tables: Mapping[str, Sequence[int]]
    ) -> PrefillGroup:
        """``first_row``: the lane's row where the group begins."""
        at_tier = self._upload if tier is Tier.GPU else lambda tensor: tensor
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
                chunks.append(PrefillChunk(rows, item.context_len, at_tier(blocks), self._upload(mask)))
        return PrefillGroup(
            tier,
            slice(first_row, row),
            at_tier(torch.cat(row_blocks)),
            at_tier(torch.cat(row_offsets)),
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


def _prompt_rows(item: LaneItem, first_row: int) -> list[PromptRows]:
    """Rows of a chunk that give log-probabilities the request lacks; the chunk begins at ``first_row``. Output tokens
    got theirs when they were sampled."""
    request = item.request
    start = max(item.start, len(request.prompt_logprobs))
    stop = min(item.context_len, request.prompt_len - 1)
    if start >= stop:
        return []
    rows = slice(first_row + start - item.start, first_row + stop - item.start)
    return [PromptRows(request, rows, request.prompt_token_ids[start + 1 : stop + 1])]
