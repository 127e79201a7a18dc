"""What a GPU batch or a CPU batch computes, as plain values: numbers, lists, tuples and bytes.

The process that schedules makes a description. Every rank makes tensors of it, without knowing the requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from swiftllm.core.plan import GpuBatchItem
from swiftllm.core.request import Request, Tier
from swiftllm.kv.layer_groups import LayerGroups
from swiftllm.sampling.logprobs import PromptRows

ALIGNED_IDS = 4
"""Each group's tables begin at 16 bytes: Triton compiles another kernel for other addresses."""
Chunk = tuple[int, int, list[list[int]]]
"""A prefill chunk: its first position, the tokens of its context, and its block table in each group of layers."""
Tables = Mapping[str, Sequence[int]]
"""Block ids by request id, in the order of :class:`~swiftllm.kv.layer_groups.LayerGroups`."""


class GpuBatchInput(NamedTuple):
    """A GPU batch, row by row: prefills for the GPU tier, prefills for the CPU tier, decodes.

    ``sampling_rows`` get a token, ``scored_rows`` (first, last + 1) log-probabilities of the next token of the prompt.
    """

    token_ids: list[int]
    positions: list[int]
    gpu_prefills: list[Chunk]
    cpu_prefills: list[Chunk]
    decode_lens: list[int]
    decode_tables: bytes  # int32 [groups, decodes, max_blocks]
    sampling_rows: list[int]
    scored_rows: list[tuple[int, int]]


class CpuBatchInput(NamedTuple):
    """A CPU batch: the newest token of each request, the tokens of its context, and its block tables."""

    token_ids: list[int]
    lens: list[int]
    block_tables: bytes  # int32 [groups, rows, max_blocks]


def gpu_batch_input(
    items: Sequence[GpuBatchItem], tables: Tables, groups: LayerGroups
) -> tuple[GpuBatchInput, list[Request], list[PromptRows]]:
    """The GPU batch, the requests of its ``sampling_rows``, and what its ``scored_rows`` are for.

    Raises:
        ValueError: an item decodes from the CPU tier.
    """
    stray = next((i for i in items if not i.is_prefill and i.tier is Tier.CPU), None)
    if stray is not None:
        raise ValueError(f"request {stray.request.request_id} decodes from the CPU tier: it belongs in a CPU batch")
    of_tier = {tier: [item for item in items if item.is_prefill and item.tier is tier] for tier in Tier}
    decodes = [item for item in items if not item.is_prefill]
    items = [*of_tier[Tier.GPU], *of_tier[Tier.CPU], *decodes]
    sampling, prompts, num_rows = [], [], 0
    for item in items:
        if item.is_prefill and item.request.sampling.prompt_logprobs is not None:
            prompts += _prompt_rows(item, num_rows)
        num_rows += item.num_tokens
        if item.samples:
            sampling.append((num_rows - 1, item.request))
    lens = [item.context_len for item in decodes]
    description = GpuBatchInput(
        token_ids=[t for item in items for t in item.request.token_ids(item.start, item.context_len)],
        positions=[p for item in items for p in range(item.start, item.context_len)],
        gpu_prefills=[_chunk(item, tables, groups) for item in of_tier[Tier.GPU]],
        cpu_prefills=[_chunk(item, tables, groups) for item in of_tier[Tier.CPU]],
        decode_lens=lens,
        decode_tables=_block_tables((item.request for item in decodes), lens, tables, groups),
        sampling_rows=[row for row, _ in sampling],
        scored_rows=[(prompt.rows.start, prompt.rows.stop) for prompt in prompts],
    )
    return description, [request for _, request in sampling], prompts


def cpu_batch_input(requests: Sequence[Request], tables: Tables, groups: LayerGroups) -> CpuBatchInput:
    lens = [request.num_tokens for request in requests]
    token_ids = [t for request, n in zip(requests, lens, strict=True) for t in request.token_ids(n - 1, n)]
    return CpuBatchInput(token_ids, lens, _block_tables(requests, lens, tables, groups))


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
