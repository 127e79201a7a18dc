"""Contexts that prefill chunks attend to, as shared prefixes give them: what they take of a GPU's memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swiftllm.config import EngineConfig
from swiftllm.core.plan import GpuBatchItem
from swiftllm.core.request import SamplingParams, Tier
from swiftllm.runtime.memory_estimate import widest_iteration
from swiftllm.runtime.torch_backend import open_torch_backend
from tests.reference.backend_driver import BackendDriver
from tests.reference.fake_gpu import fake_gpu

CACHED, COMPUTED = 410, 2


@pytest.mark.parametrize("tier", list(Tier))
@pytest.mark.parametrize("chunks", [1, 12])
def test_a_gpu_batch_of_cached_prefixes_takes_no_more_memory_than_the_widest_iteration(
    tiny_model_dir, tier: Tier, chunks: int
) -> None:
    """A cached prefix costs few computed tokens: they do not bound how many contexts a GPU batch has."""
    model_dir: Path = tiny_model_dir(num_hidden_layers=2, max_position_embeddings=512)
    blocks = 30 * chunks
    limits = {"max_num_batched_tokens": 32, "max_num_seqs": 16, "max_model_len": 450}
    config = EngineConfig(
        str(model_dir), dtype="float32", num_gpu_blocks=blocks, num_cpu_blocks=blocks, load_format="dummy", **limits
    )
    with fake_gpu(0, can_capture=False) as cuda:
        backend = open_torch_backend(config)
        driver = BackendDriver(backend)
        for pool in backend.kv_pools.tensors.values():
            pool.zero_()
        requests = [driver.admit(str(i), [5] * (CACHED + COMPUTED), tier, SamplingParams()) for i in range(chunks)]

        def peak(work) -> int:
            torch.cuda.synchronize()
            before = cuda.peak = cuda.allocated
            work()
            return cuda.peak - before

        counted = peak(lambda: widest_iteration(backend.model, backend.sampler, config, torch.float32))
        taken = peak(lambda: driver.run([GpuBatchItem(request, CACHED, COMPUTED, tier, True) for request in requests]))
    assert taken <= 1.1 * counted
