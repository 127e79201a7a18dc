"""What a lane or a cohort computes, as plain values: numbers, lists, tuples and bytes.

The process that schedules makes a description. Every rank makes tensors of it, without knowing the requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from swiftllm.core.plan import LaneItem
from swiftllm.core.request import Request, Tier
from swiftllm.sampling.logprobs import PromptRows

Chunk = tuple[int, int, list[int]]
"""A prefill chunk: its first position, the tokens of its context, and the blocks that hold these."""
Tables = Mapping[str, Sequence[int]]
"""Block ids by request id."""


class LaneDescription(NamedTuple):
    """A lane, row by row: prefills for the GPU tier, prefills for the CPU tier, decodes.

    ``sampling_rows`` get a token, ``scored_rows`` (first, last + 1) log-probabilities of the next token of the prompt.
    """

    token_ids: list[int]
    positions: list[int]
    gpu_prefills: list[Chunk]
    cpu_prefills: list[Chunk]
    decode_lens: list[int]
    decode_tables: bytes  # int32 [decodes, max_blocks]
    sampling_rows: list[int]
    scored_rows: list[tuple[int, int]]


class CohortDescription(NamedTuple):
    """A cohort: the newest token of each request, the tokens of its context, and its blocks."""

    token_ids: list[int]
    lens: list[int]
    block_tables: bytes  # int32 [rows, max_blocks]


def describe_lane(
    items: Sequence[LaneItem], tables: Tables, block_size: int
) -> tuple[LaneDescription, list[Request], list[PromptRows]]:
    """The lane, the requests of its ``sampling_rows``, and what its ``scored_rows`` are for.

    Raises:
        ValueError: an item decodes from the CPU tier.
    """
    stray = next((i for i in items if not i.is_prefill and i.tier is Tier.CPU), None)
    if stray is not None:
        raise ValueError(f"request {stray.request.request_id} decodes from the CPU tier: it belongs in a cohort")
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
    description = LaneDescription(
        token_ids=[t for item in items for t in item.request.token_ids(item.start, item.context_len)],
        positions=[p for item in items for p in range(item.start, item.context_len)],
        gpu_prefills=[_chunk(item, tables, block_size) for item in of_tier[Tier.GPU]],
        cpu_prefills=[_chunk(item, tables, block_size) for item in of_tier[Tier.CPU]],
        decode_lens=lens,
        decode_tables=_block_tables((item.request for item in decodes), lens, tables, block_size),
        sampling_rows=[row for row, _ in sampling],
        scored_rows=[(prompt.rows.start, prompt.rows.stop) for prompt in prompts],
    )
    return description, [request for _, request in sampling], prompts


def describe_cohort(requests: Sequence[Request], tables: Tables, block_size: int) -> CohortDescription:
    lens = [request.num_tokens for request in requests]
    token_ids = [t for request, n in zip(requests, lens, strict=True) for t in request.token_ids(n - 1, n)]
    return CohortDescription(token_ids, lens, _block_tables(requests, lens, tables, block_size))


def _chunk(item: LaneItem, tables: Tables, block_size: int) -> Chunk:
    num_blocks = -(-item.context_len // block_size)
    return item.start, item.context_len, list(tables[item.request.request_id][:num_blocks])


def _block_tables(requests: Iterable[Request], lens: list[int], tables: Tables, block_size: int) -> bytes:
    counts = [-(-n // block_size) for n in lens]
    table = np.zeros((len(lens), max(counts, default=0)), dtype=np.int32)
    for row, (request, count) in enumerate(zip(requests, counts, strict=True)):
        table[row, :count] = tables[request.request_id][:count]
    return table.tobytes()


def _prompt_rows(item: LaneItem, first_row: int) -> list[PromptRows]:
    """Rows of a chunk that give log-probabilities the request lacks; the chunk begins at ``first_row``. Output tokens
    got theirs when they were sampled."""
    request = item.request
    start = max(item.start, len(request.prompt_logprobs))
    stop = min(item.context_len, request.prompt_len - 1)
    if start >= stop:
        return []
    rows = slice(first_row + start - item.start, first_row + stop - item.start)
    return [PromptRows(request, rows, tuple(request.prompt_token_ids[start + 1 : stop + 1]))]
