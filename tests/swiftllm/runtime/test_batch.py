"""What a lane's chunks attend to and what is stored of them, in layers with attention windows."""

from __future__ import annotations

import random

import torch

from swiftllm.core.plan import LaneItem
from swiftllm.core.request import Request, SamplingParams, Tier
from swiftllm.device.host import HostDevice
from swiftllm.kv.layer_groups import LayerGroups
from swiftllm.runtime.batch import BatchBuilder
from swiftllm.runtime.description import describe_lane


def test_no_two_rows_of_a_lane_are_stored_in_one_slot() -> None:
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
            items.append(LaneItem(request, start, count, tier, True))
            tables[request.request_id] = [pool.pop() for _ in range(groups.blocks_for(start + count))]
        lane = builder.open_lane(describe_lane(items, tables, groups)[0])
        by_tier = [item for tier in (Tier.GPU, Tier.CPU) for item in items if item.tier is tier]
        tokens = [(item, position) for item in by_tier for position in range(item.start, item.context_len)]
        for group, window in enumerate(groups.windows):
            stored: dict[tuple[int, int], tuple[LaneItem, int]] = {}
            for prefills in lane.prefills:
                slots = prefills.stored[group]
                rows = torch.arange(lane.num_rows)[slots.rows].tolist()
                for row, *slot in zip(rows, slots.blocks.tolist(), slots.offsets.tolist(), strict=True):
                    assert tuple(slot) not in stored, "the order of writes would decide"
                    stored[tuple(slot)] = tokens[row]
            dropped += lane.num_rows - len(stored)
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
                lane = builder.open_lane(
                    describe_lane([LaneItem(request, start, count, tier, True)], {"a": table}, groups)[0]
                )
                for group, window in enumerate(groups.windows):
                    context = lane.prefills[0].chunks[0].contexts[group]
                    if context is None:
                        assert start == 0 or (window == 1 and start % 4 == 0)
                        continue
                    first = start - context.num_tokens
                    assert window is None or context.num_tokens < window + 4
                    assert context.has_chunk == (window is None and tier is Tier.GPU)
                    for row, attends in enumerate(context.mask.tolist()):
                        newest = start + row
                        oldest = 0 if window is None else max(0, newest - window + 1)
                        assert oldest >= first
                        expected = [oldest <= first + column <= newest for column in range(len(attends))]
                        assert attends == expected and len(attends) == context.num_tokens + count
