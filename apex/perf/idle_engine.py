"""An engine on a backend that does nothing: its iterations take the host's time alone."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from swiftllm.core.plan import GpuBatchItem, Swap
from swiftllm.core.request import SamplingParams, TokenLogprob
from swiftllm.engine.engine import Engine
from swiftllm.kv.blocks import KVCacheManager
from swiftllm.scheduling.admission import SchedulerLimits
from swiftllm.systems import Platform, build, find_system


class _NoWork:
    """What decodes on the GPU alone ask of a backend. Its operations return at once."""

    worker_restarts = 0

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.now = time.perf_counter

    def swap(self, swaps: Sequence[Swap]) -> None:
        pass

    def open_gpu_batch(self, items: Sequence[GpuBatchItem]) -> list[str]:
        return [item.request.request_id for item in items]

    def run_stage(self, layer: int, batches: Sequence[list[str]]) -> Mapping[str, int]:
        return dict.fromkeys(batches[0], 0) if layer == self.num_layers - 1 else {}

    def gpu_attention(self, layer: int, gpu_batch: list[str]) -> None:
        pass

    def run_full_graph(self, gpu_batch: list[str]) -> None:
        pass

    def holds_weights(self, layer: int) -> bool:
        return True

    def take_logprobs(self) -> Mapping[str, TokenLogprob]:
        return {}


def idle_engine(num_layers: int, requests: int) -> Engine:
    """An engine of that many endless decodes, without any computation."""
    backend = _NoWork(num_layers)
    limits = SchedulerLimits(requests, requests, 1 << 20)
    kv = KVCacheManager(2 * requests, 0, limits.max_model_len)
    platform = Platform(backend, limits, kv, {}, vocab_size=1)  # pyright: ignore[reportArgumentType]  # not all of it
    engine = build(find_system("swiftllm"), platform)
    endless = SamplingParams(max_tokens=limits.max_model_len - 1, ignore_eos=True)
    for i in range(requests):
        engine.add(engine.make_request(str(i), (0,), endless))
    engine.step()  # the prefills
    return engine
