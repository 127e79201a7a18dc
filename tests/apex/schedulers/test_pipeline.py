"""The search behind the batches of asymmetric pipelining, and the even split, against their definitions."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate

import pytest

from apex.perf.model import GpuBatchLoad, PerfModel
from apex.schedulers.hybrid import CpuDecodes, Pipeline, longest_run
from swiftllm.core.request import Request, SamplingParams, Tier
from swiftllm.kv.kv_cache_manager import KVCacheManager
from swiftllm.scheduling.scheduler import PlanBuilder
from tests.reference.fake_engine import fake_engine
from tests.reference.linear_profile import flat_ends_table


def decoding(request_id: str, num_tokens: int, tier: Tier = Tier.CPU) -> Request:
    return Request(request_id, (1,) * num_tokens, SamplingParams(max_tokens=9), tier=tier)


def steps(rng: random.Random, most: int, shape: str) -> list[float]:
    if shape == "line":
        return [rng.uniform(0.9, 1.1) for _ in range(most)]
    if shape == "flat":
        return [0.0] * most
    return [rng.choice((0.0, 0.0, 1e-6, 100.0)) for _ in range(most)]


@pytest.mark.parametrize("shape", ["line", "flat", "jumps"])
def test_longest_run_is_the_last_count_within_the_limit(shape: str) -> None:
    rng = random.Random(1)
    for _ in range(500):
        most = rng.choice((0, 1, 2, 3, 10, 700))
        seconds = [0.0, *accumulate(steps(rng, most, shape))]
        limit_s = rng.choice((-1.0, rng.uniform(0.0, 1.1) * seconds[-1], rng.choice(seconds)))
        asked: list[int] = []

        def ask(count: int, seconds: list[float] = seconds, asked: list[int] = asked) -> float:
            asked.append(count)
            return seconds[count]

        expected = max((n for n in range(1, most + 1) if seconds[n] <= limit_s), default=0)
        assert longest_run(ask, limit_s, most) == expected
        assert len(asked) == len(set(asked)) and len(asked) <= 2 + 6 + most.bit_length()


def test_the_even_split_gives_the_longest_to_whoever_has_less_to_read() -> None:
    rng = random.Random(2)
    for _ in range(50):
        requests = [decoding(str(i), rng.randint(1, 12)) for i in range(rng.randint(1, 30))]
        pipeline = Pipeline(PerfModel(flat_ends_table(1e-7, 1e-6), 4), GpuBatchLoad(0, 0, 0, 0, ()))
        pipeline.split_evenly(CpuDecodes(requests))
        expected: tuple[list[Request], list[Request]] = ([], [])
        for request in sorted(requests, key=lambda request: -request.num_tokens):
            min(expected, key=lambda batch: sum(r.num_tokens for r in batch)).append(request)
        for batch, members in zip(pipeline.batches, expected, strict=True):
            assert batch.requests == members
            assert batch.context_tokens == sum(request.num_tokens for request in members)


def test_batches_know_what_they_read_and_lose_nobody() -> None:
    """Whoever is in no batch would have shown in either."""
    rng = random.Random(4)
    model = PerfModel(flat_ends_table(1e-7, 1e-6), 4)
    for _ in range(50):
        ready = [decoding(str(i), rng.randint(1, 400)) for i in range(rng.randint(1, 40))]
        pipeline = Pipeline(model, GpuBatchLoad(20, 20, 20, 20 * rng.randint(1, 300), ()))
        pipeline.add_hidden(CpuDecodes(ready))
        taken = [request for batch in pipeline.batches for request in batch.requests]
        assert len(taken) == len({request.request_id for request in taken})
        assert pipeline.hides_cpu() and pipeline.num_requests == 20 + len(taken)
        for batch in pipeline.batches:
            assert batch.context_tokens == sum(request.num_tokens for request in batch.requests)
            for request in ready:
                longer = batch.size + 1, batch.context_tokens + request.num_tokens
                assert request in taken or not pipeline.hides(batch, *longer)


def test_one_block_more_for_each_or_for_none() -> None:
    requests = [decoding(str(i), 4) for i in range(3)]
    kv = KVCacheManager(num_gpu_blocks=0, num_cpu_blocks=5, block_size=4)
    for request in requests:
        request.tier = Tier.CPU
        assert kv.allocate_slots(request, 4)
    assert not kv.allocate_block_each(requests, Tier.CPU)
    assert [(kv.num_held(request), request.num_kv_slots) for request in requests] == [(1, 4)] * 3
    assert kv.allocate_block_each(requests[:2], Tier.CPU)
    assert [(kv.num_held(request), request.num_kv_slots) for request in requests] == [(2, 8), (2, 8), (1, 4)]
    kv.check_blocks()


def test_a_load_without_a_prefill_is_that_of_a_plan_without_it() -> None:
    builder = PlanBuilder(fake_engine("swiftllm", num_gpu_blocks=9, num_cpu_blocks=9, max_tokens=100).state)
    builder.add_decodes([decoding("a", 5), decoding("b", 7)])
    for name, num_tokens in (("c", 10), ("d", 20), ("e", 20)):
        builder.add_prefill(decoding(name, num_tokens, Tier.GPU))
    load, item = GpuBatchLoad.from_builder(builder), builder.prefills[1]
    assert (load.tokens, load.requests, load.decodes, load.decode_context) == (52, 5, 2, 12)
    builder.put_off(item)
    of_items = GpuBatchLoad.from_items(builder.plan().gpu_batch)
    assert of_items.longest_context == 7  # a plan's predictions take all contexts as equal
    assert load.without(item) == GpuBatchLoad.from_builder(builder) == replace(of_items, longest_context=0)
    assert builder.tokens_left == 100 - 32


def test_the_even_split_counts_requests_under_way_as_context_of_batch_1() -> None:
    pipeline = Pipeline(PerfModel(flat_ends_table(1e-7, 1e-6), 4), GpuBatchLoad(0, 0, 0, 0, ()))
    pipeline.add_under_way([decoding("u", 30), decoding("v", 20)])
    pipeline.split_evenly(CpuDecodes([decoding("a", 40), decoding("b", 25), decoding("c", 10)]))
    first, second = pipeline.batches
    assert [request.request_id for request in first.requests] == ["a", "b"]
    assert (first.context_tokens, second.context_tokens) == (65, 30 + 20 + 10)


def test_a_plan_whose_budget_is_used_up_takes_no_further_chunk() -> None:
    builder = PlanBuilder(fake_engine("swiftllm", num_gpu_blocks=9, num_cpu_blocks=9, max_tokens=10).state)
    for name in ("fills", "finds nothing left"):
        builder.add_prefill(decoding(name, 10, Tier.GPU))
    assert [(item.request.request_id, item.num_tokens) for item in builder.prefills] == [("fills", 10)]


def layer_s_by_events(pipeline: Pipeline, layers: int = 400) -> float:
    """The mean layer of the two batches, event by event: weights arrive in turn, and the GPU batch waits for whatever
    it needs next. A batch's attention starts when its stage has ended and the worker is free."""
    model, (first, second) = pipeline.model, pipeline.batches
    linear_s = [model.linear_s(pipeline.load.tokens + first.size), model.linear_s(second.size)]
    cpu_s = [model.cpu_attention_s(batch.size, batch.context_tokens) for batch in (first, second)]
    gpu_batch_attention_s = pipeline.load.gpu_attention_s(model)
    now = worker_free = 0.0
    attended = [0.0, 0.0]
    for layer in range(1, layers + 1):
        now = max(now, layer * model.stream_s)
        for batch in (0, 1):
            now = max(now, attended[batch]) + linear_s[batch]
            worker_free = attended[batch] = max(worker_free, now) + cpu_s[batch]
        now += gpu_batch_attention_s
    return now / layers


def test_attention_hides_behind_the_wait_for_streamed_weights() -> None:
    """Whoever is in a batch costs the GPU batch nothing but linear time, and more are than without the wait."""
    rng = random.Random(6)
    gained = 0
    for _ in range(60):
        table = flat_ends_table(1e-7, 1e-6)
        stream_s = rng.uniform(0.5, 6.0) * table.linear(20)
        pipelines = [
            Pipeline(PerfModel(one, 4), GpuBatchLoad(20, 20, 20, 20 * 30, ()))
            for one in (replace(table, stream_s=stream_s), table)
        ]
        ready = [decoding(str(i), rng.randint(1, 900)) for i in range(rng.randint(1, 60))]
        for pipeline in pipelines:
            pipeline.add_hidden(CpuDecodes(ready))
            assert pipeline.hides_cpu()
            first, second = pipeline.batches
            model, load = pipeline.model, pipeline.load
            busy_s = model.linear_s(load.tokens + first.size) + model.linear_s(second.size)
            busy_s += load.gpu_attention_s(model)
            assert layer_s_by_events(pipeline) <= 1.02 * max(busy_s, model.stream_s)
            ends_s = model.outside_layers_s(pipeline.num_requests - second.size) + model.outside_layers_s(second.size)
            ends_s -= model.host_work_s(0) if second.size else 0.0
            assert pipeline.iteration_s() == pytest.approx(4 * max(busy_s, model.stream_s) + ends_s)
        streamed, resident = (sum(batch.context_tokens for batch in one.batches) for one in pipelines)
        assert streamed >= resident
        gained += streamed > resident
    assert gained > 10
