"""CPU attention on another host beside weights that are not all on the GPU: the same tokens, on the CUDA of Python."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from apex.build import build_system
from apex.placement.measured import WeightsPlan
from apex.placement.search import TimedPlacement
from swiftllm.config import EngineConfig
from swiftllm.core.request import SamplingParams
from swiftllm.model.placement import Place, Placement
from swiftllm.remote.tier import Channel, RemoteFuture
from swiftllm.runtime.memory import stage_bytes
from tests.apex.test_end_to_end import MADE_UP_PROFILE, VARIANTS, judge
from tests.reference.fake_device import FakeCuda
from tests.reference.fake_gpu import fake_gpu
from tests.reference.tiny_model import make_tiny_llama
from tests.swiftllm.remote.hosts import SECRET, host_in_thread
from tests.swiftllm.remote.test_tokens import BLOCK_BYTES, run_to_end

MAX_TOKENS = 10
POOLS = {"block_size": 4, "num_gpu_blocks": 12, "num_cpu_blocks": 12}  # longest request: 10 blocks
PLACEMENT = Placement((Place.STREAMED, Place.CPU, Place.STREAMED, Place.STREAMED))


class FakeChannel(Channel):
    """Sends and receives whenever the fake has time for it, or when an answer is waited for: the fake has one thread.

    The host on the other end is a real one.
    """

    def __init__(self, cuda: FakeCuda, *connection: Any) -> None:
        self.cuda, self.speed, self.at_work = cuda, 0.0, False
        self.card = cuda.cards.current()  # as its threads', see DeviceThread
        super().__init__(*connection)
        cuda.workers.append(self)

    def _send_all(self) -> None: ...

    def _receive_all(self) -> None: ...

    def ask(self, *frame: Any, **how: Any) -> RemoteFuture:
        future = super().ask(*frame, **how)
        future.over = Answered(self)
        self.cuda.advance()
        return future

    def step(self) -> bool:
        if self.at_work or self._queue.empty():
            return False
        self.at_work = True
        try:
            with self.cuda.another_thread(self.card):
                frame = self._queue.get()
                self._send_one(frame)
                while frame.header.sequence in self._pending:
                    self._receive_one()
        finally:
            self.at_work = False
        return True


class Answered(threading.Event):
    """Set once an answer is there; who waits for it has the channel work."""

    def __init__(self, channel: FakeChannel) -> None:
        super().__init__()
        self.channel = channel

    def is_set(self) -> bool:
        self.channel.cuda.advance()
        return super().is_set()

    def wait(self, timeout: float | None = None) -> bool:
        while not super().is_set():
            assert self.channel.step(), "an answer waits for itself"
        return True


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory):
    model_dir = make_tiny_llama(tmp_path_factory.mktemp("tiny"))
    draw = random.Random(5)
    prompts = [[draw.randrange(3, 128) for _ in range(draw.randint(1, 30))] for _ in range(7)]
    return model_dir, prompts, judge(model_dir, prompts, MAX_TOKENS)


def tokens(model_dir: Path, prompts: Sequence[Sequence[int]], variant: str, seed: int) -> list[tuple[int, ...]]:
    """With the CPU tier here and on a host, both too small for all requests."""
    system, strategy, synchronous = VARIANTS[variant]
    with pytest.MonkeyPatch.context() as patch, host_in_thread(30 * BLOCK_BYTES) as host, fake_gpu(seed) as cuda:
        patch.setenv("APEX_HOST_SECRET", SECRET.decode())
        patch.setattr("swiftllm.remote.tier.Channel", partial(FakeChannel, cuda))
        plan = WeightsPlan(TimedPlacement(PLACEMENT, 0.0, 0.0, 0.0, 0.0))
        patch.setattr("apex.build.place_weights", lambda *_, **__: plan)
        config = EngineConfig(
            str(model_dir),
            dtype="float32",
            max_num_batched_tokens=48,
            synchronous=synchronous,
            attention_hosts=f"{host.address[0]}:{host.address[1]}",
            weights_gpu_memory=1.0,
            **POOLS,
        )
        engine = build_system(system, config, strategy, profile=MADE_UP_PROFILE)
        requests = [
            engine.add(engine.make_request(str(i), p, SamplingParams(MAX_TOKENS))) for i, p in enumerate(prompts)
        ]
        run_to_end(engine)
        stream = engine.backend.model.weights.slots
        sizes = stage_bytes(engine.backend.model_config, torch.float32)
        assert stream.bytes_sent > 10 * PLACEMENT.bytes_at(Place.STREAMED, sizes)
        assert all(of_one.channel.bytes_received > 0 for of_one in engine.backend.attention_hosts.hosts)
        engine.close()
    return [tuple(request.output_token_ids) for request in requests]


@pytest.mark.parametrize("variant", ["neo", "apex-overlap", "adaptive"])
def test_hosts_beside_placed_weights_do_not_change_tokens(tiny, variant: str) -> None:
    model_dir, prompts, expected = tiny
    seed = random.randrange(1 << 32)
    print("seed", seed)
    assert tokens(model_dir, prompts, variant, seed) == expected
