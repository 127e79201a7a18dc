"""A model on several ranks, for tests: engines of any system take turns on them, as a rank takes seconds to start."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from apex.build import build_system
from swiftllm.config import EngineConfig
from swiftllm.core.request import Request, SamplingParams
from swiftllm.engine.engine import Engine
from swiftllm.parallel.backend import open_sharded_backend
from swiftllm.parallel.team import Peer
from swiftllm.runtime.cpu_tier import CpuWorker
from tests.apex.test_end_to_end import MADE_UP_PROFILE, VARIANTS, judge
from tests.reference.ranks import LAUNCHER, fill_with_nan

POOLS = {"block_size": 4, "num_gpu_blocks": 24, "num_cpu_blocks": 400}
TOKENS = 8


class Group:
    """A model on several ranks, and engines of any system on them."""

    def __init__(self, model_dir: Path, size: int, judged_by: Path | None = None, **options: object) -> None:
        """``judged_by``: the folder that transformers reads, by default the model's own. ``options``: of the engine."""
        self.config = EngineConfig(
            str(model_dir),
            device="cpu",
            max_num_batched_tokens=48,
            gpu_batch_threads=1,
            cpu_threads=1,
            tensor_parallel=size,
            **{"dtype": "float32", **POOLS, **options},
        )
        draw = random.Random(5)
        self.prompts = [[draw.randrange(3, 100) for _ in range(draw.choice([1, 9, 30, 50]))] for _ in range(8)]
        self.expected = judge(judged_by or model_dir, self.prompts, TOKENS)
        self._cores = os.sched_getaffinity(0)
        self.backend = open_sharded_backend(self.config, CpuWorker, LAUNCHER)
        fill_with_nan(self.backend)

    def engine(self, variant: str) -> Engine:
        system, strategy, _ = VARIANTS[variant]
        with pytest.MonkeyPatch.context() as patch:
            for module in ("apex.build", "swiftllm.build"):
                patch.setattr(f"{module}.make_backend", lambda *_, **__: self.backend)
            return build_system(system, self.config, strategy, profile=MADE_UP_PROFILE)

    def add(self, engine: Engine) -> list[Request]:
        sampling = SamplingParams(TOKENS)
        return [engine.add(engine.make_request(str(i), prompt, sampling)) for i, prompt in enumerate(self.prompts)]

    def check(self, requests: list[Request]) -> None:
        assert [tuple(request.output_token_ids) for request in requests] == self.expected

    def peers(self) -> list[Peer]:
        return self.backend.team.peers

    def close(self) -> None:
        processes = [peer.process for peer in self.peers()]
        self.backend.close()
        assert all(process.poll() is not None for process in processes)
        assert os.sched_getaffinity(0) == self._cores


def run(engine: Engine) -> None:
    while engine.has_unfinished():
        engine.step()
    engine.kv.check_blocks()
    assert all(pool.num_used == 0 for pool in engine.kv.block_pools.values())
    assert engine.kv.state_slots is None or not engine.kv.state_slots.of_request


def run_on(engine: Engine) -> Exception:
    """Run until a step raises. Returns the error; then the engine has recovered."""
    with pytest.raises(Exception) as caught:
        run(engine)
    for request in engine.recover():
        engine.add(request, check_targets=False)
    return caught.value
