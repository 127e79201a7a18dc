"""The prefix cache under all schedulers: random conversations in tiny pools, and what is computed of shared prompts."""

from __future__ import annotations

import random

import pytest

from apex.strategy import StrategyConfig
from swiftllm.core.request import SamplingParams, ServiceClass, Tier
from swiftllm.scheduling.residents import Residents
from tests.apex.schedulers.test_schedulers import TABLES, check_queues, drive, make_request
from tests.reference.fake_backend import VOCABULARY, expected_output
from tests.reference.fake_engine import fake_engine

SYSTEMS = ("vllm", "swiftllm", "neo", "fastdecode", "apex", "adaptive", "omniserve", "omniserve-stepping", "llumnix")
BOTH = tuple(Tier)


class Conversations:
    """Draws requests of which most begin as an earlier one did: turns of conversations, and the same prompt again."""

    def __init__(self) -> None:
        self.texts: list[tuple[list[int], str | None]] = []

    def __call__(self, rng: random.Random, longest_prompt: int, longest_output: int):
        prompt, sampling = make_request(rng, longest_prompt, longest_output)
        salt = rng.choice((None, "a"))
        if self.texts and rng.random() < 0.8:
            text, salt = rng.choice(self.texts)
            if rng.random() < 0.7:
                prompt = text[: rng.randint(1, len(text))] + prompt
                prompt = prompt[: rng.randint(1, longest_prompt)]
            else:  # exactly as before
                prompt = text[:longest_prompt]
            if rng.random() < 0.1:
                salt = "b" if salt is None else None  # what others may not find
        self.texts.append((prompt + expected_output(prompt, sampling.max_tokens, ignore_eos=True), salt))
        if rng.random() < 0.05:
            sampling = SamplingParams(max_tokens=sampling.max_tokens, prompt_logprobs=0)
        return prompt, sampling, salt


def check(residents: Residents) -> None:
    check_queues(residents)
    kv = residents.kv
    kv.check_blocks()
    for tier, running in residents.running.items():
        for request in running:
            names = request.block_names
            assert request.num_named <= request.num_computed_tokens // kv.block_size
            for block, name in zip(kv.block_tables[request.request_id], names, strict=False):
                allocator = kv.pool_of(request)
                found = allocator._names[block - allocator.first] if allocator.caches else None
                assert found in (None, name), "a block has another name than its request's tokens"


def hits(engine) -> int:
    return sum(engine.stats().prefix_hits.values())


@pytest.mark.parametrize("tiers", [(Tier.GPU,), BOTH], ids=["gpu", "both"])
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("system", SYSTEMS)
def test_random_conversations(system: str, table: str, tiers: tuple[Tier, ...]) -> None:
    found = 0
    for seed in range(3):
        rng = random.Random(seed)
        engine = fake_engine(
            system,
            num_gpu_blocks=rng.randint(10, 40),
            num_cpu_blocks=rng.randint(20, 60),
            table=TABLES[table],
            max_tokens=rng.choice((16, 64)),
            seed=seed,
            cached_tiers=tiers,
        )
        engine.kv.most_copies = rng.choice((0, 2, 100))
        share = 0.3 if seed == 2 else 0.0
        drive(engine, rng, 60, abort_share=0.02, best_effort_share=share, check=check, draw=Conversations())
        found += hits(engine)
    assert (found > 0) == (system != "fastdecode" or Tier.CPU in tiers)
