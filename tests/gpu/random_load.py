"""Random load with swaps and aborts, every free block poisoned after each step: no wrong token may come out."""

from __future__ import annotations

import random
import time
from contextlib import closing

import torch

from swiftllm.engine import Engine
from swiftllm.request import Request, SamplingParams, Tier
from tests.gpu.judge import Judge, tiny_model
from tests.gpu.tokens import build, make_prompts

VARIANTS = ("swiftllm", "neo", "apex, overlap", "fastdecode")
MOST_UNFINISHED = 40
ABORTED = 0.1
STEPS_BETWEEN_LOOKS = 50
# As tokens.NEAR_TIE, for rounding alone: float32 logits differ by up to 1e-5 from machine to machine, and of a hundred
# thousand tokens some lie that near to the next.
ROUNDING = 1e-4


def check_random_load(device: torch.device, seconds: float = 20.0) -> None:
    """Each variant gets its share of ``seconds``; tokens of aborted requests are checked as far as they came."""
    with tiny_model() as model:
        judge = Judge(model)
        for variant in VARIANTS:
            with closing(build(model, variant, device, "float32")) as engine:
                drive(engine, variant, judge, seconds / len(VARIANTS))


def drive(engine: Engine, variant: str, judge: Judge, seconds: float) -> None:
    seed = random.randrange(1 << 30)
    draw, prompts = random.Random(seed), make_prompts(count=200, seed=seed)
    end_s, unchecked, unfinished, num_requests, num_steps = time.monotonic() + seconds, [], {}, 0, 0
    while time.monotonic() < end_s or engine.has_unfinished():
        while time.monotonic() < end_s and len(unfinished) < MOST_UNFINISHED and draw.random() < 0.7:
            prompt = prompts[num_requests % len(prompts)]
            sampling = SamplingParams(max_tokens=draw.randint(1, 60), ignore_eos=True)
            request = engine.add_request(str(num_requests), prompt, sampling)
            unfinished[request.request_id] = request
            num_requests += 1
        if unfinished and draw.random() < ABORTED:
            engine.abort(draw.choice(sorted(unfinished)))
        done = [output.request_id for output in engine.step() if output.finished]
        unchecked += [unfinished.pop(request_id) for request_id in done]
        poison_free_blocks(engine)
        num_steps += 1
        if num_steps % STEPS_BETWEEN_LOOKS == 0:
            check_some(judge, unchecked, draw, f"{variant}, seed {seed}")
            unchecked.clear()
    check_some(judge, unchecked, draw, f"{variant}, seed {seed}")
    engine.kv.check()
    assert all(pool.num_used == 0 for pool in engine.kv.allocators.values()), engine.state()
    assert num_requests >= MOST_UNFINISHED // 4, f"{variant}: only {num_requests} requests in {seconds:g} s"
    print(f"  {variant}: {num_requests} requests, {num_steps} steps, {engine.stats().swapped_blocks} blocks swapped")


def poison_free_blocks(engine: Engine) -> None:
    for tier in Tier:
        free = torch.tensor(engine.kv.allocators[tier]._free, dtype=torch.int64)
        pool = engine.backend.kv_pools.tensors[tier]
        pool[:, free.to(pool.device)] = torch.nan


def check_some(judge: Judge, finished: list[Request], draw: random.Random, where: str) -> None:
    """The judge is slow: it looks at a few, and at all there are when they are few."""
    for request in draw.sample(finished, min(8, len(finished))):
        if request.output_token_ids:
            below = judge.distance_below_best(request.prompt_token_ids, request.output_token_ids)
            assert below <= ROUNDING, f"{where}: request {request.request_id}: {below} below the best: {request}"
