"""Models with linear attention in whole engines: greedy tokens are those of transformers (float32)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import quantise
import torch
from transformers import AutoModelForImageTextToText

from apex.build import build_system
from apex.perf.profiler import Workbench
from swiftllm.build import this_machine
from swiftllm.config import EngineConfig
from swiftllm.core.request import SamplingParams
from swiftllm.engine.engine import Engine
from swiftllm.model.placement import Place, Placement
from swiftllm.runtime.torch_backend import open_torch_backend
from swiftllm.systems import build, find_system
from tests.apex.test_architectures import greedy, some_prompts
from tests.apex.test_end_to_end import MADE_UP_PROFILE, VARIANTS
from tests.reference.fake_gpu import fake_gpu
from tests.reference.tiny_linear import KINDS, linear_judge, make_tiny_linear, make_tiny_wrapped
from tests.swiftllm.remote.hosts import SECRET, host_in_thread

OUT = 9
SMALL = {"block_size": 4, "num_gpu_blocks": 24, "num_cpu_blocks": 60}
EACH = 6
"""Systems and strategies that a model runs under: others than its neighbours."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_tiny_linear(tmp_path_factory.mktemp("tiny"), name, eos_token_id=2) for name in KINDS}


def make_engine(folder: Path, variant: str = "vllm", hosts: Sequence[tuple[str, int]] = (), **how: Any) -> Engine:
    """An engine whose blocks, states and snapshots are NaN where nobody has written."""
    system, strategy, synchronous = VARIANTS[variant]
    how = {"max_num_batched_tokens": 48, **SMALL, **how}
    beside = ",".join(f"{host}:{port}" for host, port in hosts) or None
    where = {"device": "cpu", "dtype": "float32", "synchronous": synchronous, "attention_hosts": beside}
    config = EngineConfig(str(folder), **where, **how)
    engine = build_system(system, config, strategy, profile=MADE_UP_PROFILE)
    for tensor in engine.backend.kv_pools.tensors.values():
        tensor.fill_(torch.nan)
    states, transfers = engine.backend.model.states, engine.backend.state_transfers
    copies = () if transfers is None else (snapshots for _, snapshots in transfers.pools)
    for tensor in (states.recurrent, states.conv, *copies):
        tensor.fill_(torch.nan)
    return engine


def tokens_of(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int = OUT) -> list[tuple[int, ...]]:
    requests = [
        engine.add(engine.make_request(str(i), prompt, SamplingParams(max_tokens))) for i, prompt in enumerate(prompts)
    ]
    finish(engine)
    return [tuple(request.output_token_ids) for request in requests]


def finish(engine: Engine) -> None:
    """Steps until nothing is left; slots never move, and all are free at the end."""
    held: dict[str, int] = {}
    starts: dict[str, int] = {}
    for _ in range(5_000):
        if not engine.has_unfinished():
            break
        engine.step()
        engine.kv.state_slots.check()
        now = dict(engine.kv.state_slots.of_request)
        for request_id, slot in now.items():
            request = engine.state.requests[request_id]
            if starts.get(request_id) == request.num_preemptions and request_id in held:
                assert held[request_id] == slot, "a state has moved"
            starts[request_id] = request.num_preemptions
        held = now
    assert not engine.has_unfinished(), engine.status()
    assert not engine.kv.state_slots.of_request
    engine.kv.check_blocks()


def test_tokens_equal_transformers_under_every_system(folders) -> None:
    """In pools so small that requests are preempted and swapped, with CPU batches under way."""
    variants, prompts = cycle(VARIANTS), some_prompts(9)
    on_cpu = preemptions = swapped = 0
    for name, folder in folders.items():
        expected = greedy(linear_judge(folder), prompts, 20)
        for variant in islice(variants, EACH):
            engine = make_engine(folder, variant, max_num_seqs=6, num_gpu_blocks=20, num_cpu_blocks=24)
            assert tokens_of(engine, prompts, 20) == expected, (name, variant)
            stats = engine.stats()
            on_cpu += stats.cpu_busy_s > 0
            preemptions += stats.preemptions > 0
            swapped += stats.swapped_blocks > 0
            engine.close()
    assert on_cpu > 6 and preemptions > 6 and swapped > 6, (on_cpu, preemptions, swapped)


def test_tokens_are_the_same_in_graphs(folders) -> None:
    """On a made-up GPU, with swaps, a preemption and CPU batches that join."""
    system, strategy, _ = VARIANTS["apex-overlap"]
    prompts = some_prompts(9)
    expected = greedy(linear_judge(folders["Qwen3_5"]), prompts, 12)
    config = EngineConfig(
        str(folders["Qwen3_5"]), dtype="float32", block_size=4, num_gpu_blocks=20, num_cpu_blocks=24, max_num_seqs=6,
        max_num_batched_tokens=48, max_model_len=64,
    )  # fmt: skip
    with fake_gpu(0) as cuda:
        engine = build_system(system, config, strategy, profile=MADE_UP_PROFILE)
        assert tokens_of(engine, prompts, 12) == expected
        stats = engine.stats()
        engine.close()
    assert cuda.replays > 50 and stats.preemptions and stats.swapped_blocks and stats.cpu_busy_s > 0


def test_chunks_of_any_length_give_the_same_tokens(folders) -> None:
    """Shorter than the convolution, and on both sides of the rows that are computed at once."""
    prompts = [random.Random(3).choices(range(3, 100), k=n) for n in (2, 130, 64)]
    expected = greedy(linear_judge(folders["Qwen3Next"]), prompts, 4)
    for tokens in (1, 3, 63, 64, 65):
        engine = make_engine(folders["Qwen3Next"], max_num_batched_tokens=tokens, num_gpu_blocks=100)
        assert tokens_of(engine, prompts, 4) == expected, tokens
        engine.close()


def test_a_slot_keeps_nothing_of_the_request_before(folders) -> None:
    """Prompts one after another in one slot give the tokens of fresh engines."""
    prompts = some_prompts(4)
    one_slot = make_engine(folders["Qwen3_5"], max_num_seqs=1)
    tokens = [tokens_of(one_slot, [prompt])[0] for prompt in prompts]
    one_slot.close()
    for prompt, own in zip(prompts, tokens, strict=True):
        fresh = make_engine(folders["Qwen3_5"], max_num_seqs=1)
        assert tokens_of(fresh, [prompt]) == [own]
        fresh.close()


def test_an_aborted_request_frees_its_slot_and_disturbs_nobody(folders) -> None:
    """In a CPU batch, part of the way through a token, while others wait for a slot."""
    prompts = some_prompts(12)
    expected = greedy(linear_judge(folders["Qwen3_5"]), prompts, OUT)
    for variant in ("apex-overlap", "adaptive-free-running"):
        engine, aborted = make_engine(folders["Qwen3_5"], variant, max_num_seqs=6, num_gpu_blocks=20), set()
        requests = [engine.add(engine.make_request(str(i), p, SamplingParams(OUT))) for i, p in enumerate(prompts)]
        while engine.has_unfinished() and len(aborted) < 2:
            engine.step()
            under_way = (r for r in requests if r.cpu_batch_id is not None and not r.is_finished)
            if (request := next(under_way, None)) is not None:
                engine.abort(request.request_id)
                aborted.add(request)
        assert len(aborted) == 2
        finish(engine)
        engine.close()
        for request, tokens in zip(requests, expected, strict=True):
            assert tuple(request.output_token_ids) == tokens[: request.output_len], (variant, request.request_id)
            assert request.output_len == len(tokens) or request in aborted


def test_after_a_failed_step_all_is_computed_again(folders, monkeypatch) -> None:
    """A step that raises between two stages leaves states with part of a token."""
    prompts = some_prompts(6)
    expected = greedy(linear_judge(folders["Qwen3_5"]), prompts, OUT)
    engine = make_engine(folders["Qwen3_5"], "adaptive", max_num_seqs=4, num_gpu_blocks=16)
    requests = [engine.add(engine.make_request(str(i), p, SamplingParams(OUT))) for i, p in enumerate(prompts)]
    while not requests[0].output_len:
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.backend, "gpu_attention", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    for request in engine.recover():
        engine.add(request)
    finish(engine)
    engine.close()
    assert [tuple(request.output_token_ids) for request in requests] == expected


@pytest.mark.parametrize("variant", ["neo", "adaptive-free-running"])
def test_a_lost_attention_host_costs_no_token(folders, variant: str, monkeypatch) -> None:
    """Its requests are computed again, and so are those that were part of the way through a token elsewhere."""
    monkeypatch.setenv("APEX_HOST_SECRET", SECRET.decode())
    prompts = some_prompts(10)
    expected = greedy(linear_judge(folders["Qwen3_5"]), prompts, OUT)
    for call in (3, 8):
        with host_in_thread(1 << 18) as host:
            pools = {"num_gpu_blocks": 14, "num_cpu_blocks": 20, "max_model_len": 64}
            engine = make_engine(folders["Qwen3_5"], variant, [host.address], **pools)
            tier, attentions = engine.backend.attention_hosts.hosts[0], []
            attend = tier.attend

            def dies(task, *arguments, attend=attend, attentions=attentions, call=call, host=host, tier=tier):
                attentions.append(task)
                if len(attentions) == call:
                    host.close()
                    assert tier.channel.wait_dead(5.0)
                return attend(task, *arguments)

            monkeypatch.setattr(tier, "attend", dies)
            assert tokens_of(engine, prompts) == expected
            assert engine.stats().host_deaths == 1 and engine.stats().recomputed_after_host_deaths > 0
            engine.close()


def test_the_text_part_of_a_wrapper_is_the_model(tmp_path) -> None:
    folder = make_tiny_wrapped(tmp_path)
    prompts = some_prompts(3)
    expected = greedy(AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32), prompts, 5)
    engine = make_engine(folder)
    assert tokens_of(engine, prompts, 5) == expected
    engine.close()


def test_weights_that_do_not_fit_give_the_same_tokens(folders) -> None:
    """On a made-up GPU: matrices of linear attention that are streamed, and that the CPU multiplies."""
    placed = Placement((Place.CPU, Place.STREAMED, Place.RESIDENT))
    prompts = some_prompts(3)
    expected = greedy(linear_judge(folders["Qwen3_5Moe"]), prompts, 4)
    with fake_gpu(0):
        config = EngineConfig(str(folders["Qwen3_5Moe"]), dtype="float32", max_num_seqs=4, max_model_len=64, **SMALL)
        system = find_system("vllm")
        backend = open_torch_backend(config, placement=placed)
        engine = build(system, this_machine(system, config, backend))
        assert tokens_of(engine, prompts, 4) == expected
        engine.close()


def test_4_bits_give_the_tokens_of_the_dequantised_weights(tmp_path, monkeypatch) -> None:
    """Permuted outputs in codes: gates among Q, and those of key heads side by side."""
    monkeypatch.setattr(quantise, "MODULES", (*quantise.MODULES, "in_proj_qkv", "in_proj_qkvz", "in_proj_z"))
    for name, layout in (("Qwen3Next", "awq"), ("Qwen3_5", "gptq")):
        source = make_tiny_linear(tmp_path / name, name, eos_token_id=2)
        packed, dense = tmp_path / f"{name} packed", tmp_path / f"{name} dense"
        quantise.write_folder(source, packed, layout, 16)
        quantise.write_folder(source, dense, "dequantised", 16)
        expected = greedy(linear_judge(dense), some_prompts(4), 6)
        engine = make_engine(packed)
        assert tokens_of(engine, some_prompts(4), 6) == expected, name
        engine.close()


def test_without_a_cpu_tier_no_prefix_is_cached_and_the_start_says_so(folders) -> None:
    engine = make_engine(folders["Qwen3_5"], max_num_seqs=3, num_cpu_blocks=0)
    description = engine.describe()
    engine.close()
    assert description["prefix_cache"] == []
    (line,) = (line for line in description["kv_cache"] if "Linear attention" in line)
    assert "states of 3 requests" in line and "no prefix is cached" in line


def test_a_profile_is_measured_with_states(folders) -> None:
    config = EngineConfig(str(folders["Qwen3_5Moe"]), device="cpu", dtype="float32", max_num_seqs=3, **SMALL)
    backend = open_torch_backend(config)
    backend.write_blocks(24, lambda *_: None)
    bench = Workbench(backend, max_model_len=64)
    with bench.in_use():
        for timed in (bench.linear(5), bench.first_stage(4), bench.decodes(2, 2, 8)):
            assert timed() > 0
        assert backend.model.states.recurrent.isfinite().all()
    assert backend.state_slots is None
    backend.close()
