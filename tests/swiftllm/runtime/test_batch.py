"""What a GPU batch's chunks attend to and what is stored of them, in layers with attention windows."""

from __future__ import annotations

import random

import torch

from swiftllm.core.plan import GpuBatchItem
from swiftllm.core.request import Request, SamplingParams, Tier
from swiftllm.device import HostDevice
from swiftllm.kv.block_pool import LayerGroups
from swiftllm.runtime.model_input import BatchBuilder, gpu_batch_input


def test_no_two_rows_of_a_gpu_batch_are_stored_in_one_slot() -> None:
    """A chunk may be longer than a ring. Then its last tokens are stored, in slots that the newest token finds."""
    draw, dropped = random.Random(0), 0
    for windows in ((8, None), (3,), (5, 17, None)):
        groups = LayerGroups(4, windows)
        builder = BatchBuilder(HostDevice, torch.float32, groups, 2, torch.zeros(200, 2, 8))
        pool, items, tables = list(range(500)), [], {}
        draw.shuffle(pool)
        for number in range(8):
            start, count = draw.choice([0, 3, 40]), draw.choice([1, 7, 60])
            tier = draw.choice(list(Tier))
            request = Request(str(number), tuple(range(start + count)), SamplingParams(), tier=tier)
            items.append(GpuBatchItem(request, start, count, tier, True))
            tables[request.request_id] = [pool.pop() for _ in range(groups.blocks_for(start + count))]
        gpu_batch = builder.open_gpu_batch(gpu_batch_input(items, tables, groups)[0])
        by_tier = [item for tier in (Tier.GPU, Tier.CPU) for item in items if item.tier is tier]
        tokens = [(item, position) for item in by_tier for position in range(item.start, item.context_len)]
        for group, window in enumerate(groups.windows):
            stored: dict[tuple[int, int], tuple[GpuBatchItem, int]] = {}
            for prefills in gpu_batch.prefills:
                slots = prefills.stored[group]
                rows = torch.arange(gpu_batch.num_rows)[slots.rows].tolist()
                for row, *slot in zip(rows, slots.blocks.tolist(), slots.offsets.tolist(), strict=True):
                    assert tuple(slot) not in stored, "the order of writes would decide"
                    stored[tuple(slot)] = tokens[row]
            dropped += gpu_batch.num_rows - len(stored)
            for item in by_tier:
                table = groups.tables([tables[item.request.request_id]], [item.context_len])[group, 0]
                for position in range(max(item.start, item.context_len - (window or 1000)), item.context_len):
                    assert stored[table[position // 4], position % 4] == (item, position)
    assert dropped > 300


def test_rows_of_a_chunk_attend_to_the_window_before_them() -> None:
    for windows in ((8, None), (3,), (1, 2)):
        groups = LayerGroups(4, windows)
        builder = BatchBuilder(HostDevice, torch.float32, groups, 2, torch.zeros(200, 2, 8))
        for start, count in ((0, 9), (5, 1), (6, 30), (41, 3), (44, 9)):
            request = Request("a", tuple(range(start + count)), SamplingParams(), tier=Tier.GPU)
            table = list(range(100, 100 + groups.blocks_for(start + count)))
            for tier in Tier:
                gpu_batch = builder.open_gpu_batch(
                    gpu_batch_input([GpuBatchItem(request, start, count, tier, True)], {"a": table}, groups)[0]
                )
                for group, window in enumerate(groups.windows):
                    (call,) = gpu_batch.prefills[0].calls[group]
                    if call.contexts is None:
                        assert start == 0 or (window == 1 and start % 4 == 0)
                        assert call.lens.tokens == call.lens.rows == (count,)
                        continue
                    (tokens,) = call.lens.tokens
                    first = start + count - tokens
                    assert 0 <= first <= (0 if window is None else max(0, start - window + 1)) and first < start
                    assert window is None or start - first < window + 4
                    assert call.has_own == (window is None and tier is Tier.GPU)
                    assert call.contexts.tokens == (tokens if call.has_own else start - first,)


def test_contexts_of_one_call_have_no_more_tokens_than_the_longest_request() -> None:
    """Chunks that attend to themselves alone need no memory for contexts, and may be any number."""
    groups, device = LayerGroups(4), HostDevice()
    device.torch_device = torch.device("meta")
    builder = BatchBuilder(device, torch.float32, groups, 2, torch.zeros(50, 2, 8))
    spans = (0, 9), (0, 3), (10, 2), (20, 10), (1, 7), (40, 10), (0, 2), (30, 1)
    items, tables = [], {}
    for i, (start, count) in enumerate(spans):
        request = Request(str(i), tuple(range(start + count)), SamplingParams(), tier=Tier.GPU)
        items.append(GpuBatchItem(request, start, count, Tier.GPU, True))
        tables[request.request_id] = list(range(20 * i, 20 * i + groups.blocks_for(start + count)))
    for tier in Tier:
        of_tier = [item._replace(tier=tier) for item in items]
        (calls,) = builder.open_gpu_batch(gpu_batch_input(of_tier, tables, groups)[0]).prefills[0].calls
        assert [call.lens.tokens for call in calls] == [(9, 3), (12, 30, 8), (50,), (2,), (31,)]
        assert [call.lens.rows for call in calls] == [(9, 3), (2, 10, 7), (10,), (2,), (1,)]
        assert [call.rows.start for call in calls] == [0, 12, 31, 41, 43]
        assert [call.contexts is None for call in calls] == [True, False, False, True, False]
        own = (12, 30, 8) if tier is Tier.GPU else (10, 20, 1)
        assert calls[1].contexts.tokens == own
        blocks = [
            *range(40, 43),
            *range(60, 68 if tier is Tier.GPU else 65),
            *range(80, 82 if tier is Tier.GPU else 81),
        ]
        assert calls[1].contexts.blocks.tolist() == blocks


def test_states_are_listed_as_rows_come() -> None:
    """Chunks on the GPU, those in the CPU tier, decodes, whatever their order in the plan."""
    requests = [Request(name, tuple(range(5)), SamplingParams(max_tokens=3)) for name in "abc"]
    starts = (4, 1, Tier.GPU, False), (0, 5, Tier.CPU, True), (0, 5, Tier.GPU, True)
    items = [GpuBatchItem(request, *start) for request, start in zip(requests, starts, strict=True)]
    tables = {"a": [0, 1], "b": [2, 3], "c": [4, 5]}
    description, _, _ = gpu_batch_input(items, tables, LayerGroups(4), {"a": 7, "b": 8, "c": 9})
    assert [chunk[2] for chunk in description.gpu_prefills + description.cpu_prefills] == [[[4, 5]], [[2, 3]]]
    assert description.state_slots == [9, 8, 7]
