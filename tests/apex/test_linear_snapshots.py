"""The prefix cache of models with linear attention in whole engines: tokens are those of transformers (float32).

Between any two steps all blocks, slots and snapshots that hold nothing are poisoned: who reads one gets no tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path

import pytest
import torch

from swiftllm.core.request import Request, SamplingParams
from swiftllm.engine.engine import Engine
from swiftllm.runtime import memory
from swiftllm.sampling.sampler import LogitsNotFinite
from tests.apex.test_architectures import greedy
from tests.apex.test_end_to_end import VARIANTS
from tests.apex.test_linear_attention import make_engine
from tests.apex.test_prefix_cache import poison as poison_blocks
from tests.reference.fake_gpu import fake_gpu
from tests.reference.tiny_linear import KINDS, linear_judge, make_tiny_linear

VOCABULARY = range(3, 100)
OUT = 14
TURNS, CLIENTS = 3, 5
EACH = 7
"""Systems and strategies that a model runs under: others than its neighbours."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_tiny_linear(tmp_path_factory.mktemp("tiny"), name, eos_token_id=2) for name in KINDS}


@pytest.fixture(autouse=True)
def many_snapshots(monkeypatch) -> None:
    """A tiny model's state takes as many bytes as twelve of its blocks."""
    monkeypatch.setattr(memory, "SNAPSHOT_SHARE", 0.9)


def poison(engine: Engine) -> None:
    """Slots whose copies are still to be made keep what they hold."""
    poison_blocks(engine)
    kv, wanted = engine.kv, {copy.slot for copy in engine.kv.state_copies}
    slots = torch.tensor([slot for slot in kv.state_slots._free if slot not in wanted], dtype=torch.int64)
    free = torch.tensor(kv.snapshots._free, dtype=torch.int64)
    for states, snapshots in engine.backend.state_transfers.pools:
        states[:, slots] = torch.nan
        snapshots[free] = torch.nan


def converse(engine: Engine, ask: Callable[[list[int]], tuple[int, ...]]) -> list[Request]:
    """Rounds of a conversation with some clients, who all begin with the same text; one aborts and asks again. ``ask``
    says what the answers should be."""
    rng, requests = random.Random(4), []
    engine.kv.snapshots.every = 8
    head = rng.choices(VOCABULARY, k=13)
    texts = [[*head, *rng.choices(VOCABULARY, k=5 * (client // 2))] for client in range(CLIENTS)]
    poison(engine)
    for turn in range(TURNS):
        sampling = SamplingParams(max_tokens=OUT)
        asked = [engine.add(engine.make_request(f"{turn}-{i}", text, sampling)) for i, text in enumerate(texts)]
        engine.add(engine.make_request(f"{turn}-aborted", texts[3], sampling))
        for step in range(3000):
            if not engine.has_unfinished():
                break
            engine.step()
            if step == 4:
                engine.abort(f"{turn}-aborted")
            engine.kv.check_blocks()
            poison(engine)
        assert not engine.has_unfinished(), engine.status()
        for request, text in zip(asked, texts, strict=True):
            assert tuple(request.output_token_ids) == ask(text), request.request_id
        texts = [[*r.prompt_token_ids, *r.output_token_ids, *rng.choices(VOCABULARY, k=6)] for r in asked]
        requests += asked
    return requests


@pytest.mark.parametrize("name", KINDS)
def test_tokens_equal_transformers_under_every_system(folders, name: str) -> None:
    """In pools so small that requests are preempted and swapped, with and without CPU batches under way."""
    judge, answers = linear_judge(folders[name]), {}

    def ask(text: list[int]) -> tuple[int, ...]:
        if tuple(text) not in answers:
            (answers[tuple(text)],) = greedy(judge, [text], OUT)
        return answers[tuple(text)]

    found = resumed = preemptions = swapped = 0
    variants = islice(cycle(VARIANTS), EACH * list(KINDS).index(name), EACH * list(KINDS).index(name) + EACH)
    for number, variant in enumerate(variants):
        blocks = {"num_gpu_blocks": 20 + 40 * (number % 2), "num_cpu_blocks": 36}
        engine = make_engine(folders[name], variant, max_num_seqs=4, prefix_cache_tiers="both", **blocks)
        requests, stats = converse(engine, ask), engine.stats()
        engine.close()
        found += sum(stats.prefix_hits.values()) > 0
        resumed += any(request.num_preemptions for request in requests)
        preemptions += stats.preemptions > 0
        swapped += stats.swapped_blocks > 0
    assert found == EACH and resumed and preemptions and swapped > 1, (found, resumed, preemptions, swapped)


def logits_of(engine: Engine, prompt: Sequence[int], monkeypatch) -> tuple[Request, torch.Tensor]:
    """What the tokens after a prompt are chosen from, ``[tokens, vocabulary]``."""
    seen, sample = [], engine.backend.sampler.sample

    def noting(logits: torch.Tensor, *others):
        seen.append(logits.clone())
        return sample(logits, *others)

    with monkeypatch.context() as patch:
        patch.setattr(engine.backend.sampler, "sample", noting)
        request = engine.add(engine.make_request(f"r{len(prompt)}", prompt, SamplingParams(max_tokens=OUT)))
        while engine.has_unfinished():
            engine.step()
            poison(engine)
    return request, torch.cat(seen)


@pytest.mark.parametrize("name", KINDS)
def test_logits_after_a_snapshot_are_those_without_one(folders, name: str, monkeypatch) -> None:
    prompt = random.Random(1).choices(VOCABULARY, k=70)
    logits = {}
    for found in (0, 68):
        engine = make_engine(folders[name], "swiftllm", num_gpu_blocks=60, prefix_cache_tiers="both")
        if found:
            logits_of(engine, prompt, monkeypatch)
        request, logits[found] = logits_of(engine, [*prompt, 5, 6, 7], monkeypatch)
        assert request.num_cached_tokens == found
        engine.close()
    assert logits[68].shape == logits[0].shape
    assert (logits[68] - logits[0]).abs().max() < 1e-5 * logits[0].abs().max()


def turns(folder: Path) -> list[list[int]]:
    """Outputs of two turns, of which the second finds the first. While a prompt is alone nothing is sampled, and the
    host waits for nothing."""
    engine, rng = make_engine(folder, "swiftllm", max_num_seqs=2, prefix_cache_tiers="both"), random.Random(2)
    text, outputs = rng.choices(VOCABULARY, k=15), []
    for turn in range(2):
        request = engine.add(engine.make_request(f"{turn}", text, SamplingParams(max_tokens=3, ignore_eos=True)))
        while engine.has_unfinished():
            engine.step()
        outputs.append(request.output_token_ids)
        text = [*text, *request.output_token_ids, *rng.choices(VOCABULARY, k=5)]
    assert request.num_cached_tokens == 12
    engine.close()
    return outputs


def test_on_a_gpu_every_wait_for_a_copy_is_needed(folders) -> None:
    """On streams made of Python, whose work comes late and out of order."""
    folder, sites = folders["Qwen3_5"], set()
    expected = turns(folder)
    for seed in range(2):  # what is done already need not be waited for
        with fake_gpu(seed) as cuda:
            assert turns(folder) == expected
        sites |= {site for site in cuda.sites if "StateTransfers" in site}

    def is_noticed(site: str) -> bool:
        for seed in range(8):
            try:
                with fake_gpu(seed, ignored=site):
                    if turns(folder) != expected:
                        return True
            except LogitsNotFinite:
                return True
        return False

    assert len(sites) == 2 and all(map(is_noticed, sites)), sites


def test_the_plan_of_memory_has_snapshots_and_the_start_says_so(folders) -> None:
    engine = make_engine(folders["Qwen3_5"], max_num_seqs=3)
    description, plan = engine.describe(), engine.backend.kv_plan
    engine.close()
    each, of_block = engine.backend.model_config.state_bytes(4), plan.bytes_per_block
    assert plan.num_snapshots == int(60 * 9 * list(of_block.values())[1] // each) > 0
    assert description["prefix_cache"] == ["gpu"]
    (line,) = (line for line in description["kv_cache"] if "Linear attention" in line)
    assert f"{plan.num_snapshots} of prefixes" in line
    papers = make_engine(folders["Qwen3_5"], "swiftllm", max_num_seqs=3)
    assert papers.describe()["prefix_cache"] == [] and papers.backend.kv_plan.num_snapshots == 0
    papers.close()


def test_tiers_that_are_asked_for_need_a_cpu_tier(folders) -> None:
    with pytest.raises(ValueError, match="prefix_cache_tiers=both needs a CPU tier"):
        make_engine(folders["Qwen3_5"], prefix_cache_tiers="both", num_cpu_blocks=0)
