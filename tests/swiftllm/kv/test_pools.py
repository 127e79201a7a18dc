"""The first write of the pools: by the threads of pacpu that will read them, whatever the format, and all zeros."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import pacpu
from swiftllm.config import EngineConfig
from swiftllm.core.request import Tier
from swiftllm.runtime.torch_backend import open_torch_backend
from tests.reference.fake_gpu import fake_gpu
from tests.reference.tiny_model import make_tiny_llama

LAYERS = 2


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"), num_hidden_layers=LAYERS)


@pytest.fixture
def zeroed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Address and bytes of what pacpu zeroes, and on how many threads."""
    calls, zero = [], pacpu.zero

    def noted(array: torch.Tensor, *, num_threads: int) -> None:
        calls.append((array.data_ptr(), array.nbytes, num_threads))
        zero(array, num_threads=num_threads)

    monkeypatch.setattr(pacpu, "zero", noted)
    return calls


def write(model_dir: Path, written: int, on_gpu: bool, **options):
    sizes = {"num_gpu_blocks": 5, "num_cpu_blocks": 40, "max_num_seqs": 2}
    config = EngineConfig(str(model_dir), device="cpu", dtype="float32", cpu_threads=3, **sizes, **options)
    backend, told = open_torch_backend(config), []
    pools = backend.kv_pools
    for tier in Tier:
        if not (on_gpu and tier is Tier.GPU):
            pools.tensors[tier].fill_(7)
    backend.write_blocks(written, lambda done, what: told.append((done, what)))
    assert pools.num_written == written
    assert [done for done, _ in told] == [n / (2 * LAYERS) for n in range(2 * LAYERS)]
    backend.close()
    return pools


@pytest.mark.parametrize("dtype", ["auto", "int8"])
@pytest.mark.parametrize("written", [3, 20, 100])
def test_pacpus_threads_zero_the_first_blocks_of_both_tiers(model_dir: Path, zeroed, written: int, dtype: str) -> None:
    pools = write(model_dir, written, on_gpu=False, cpu_kv_dtype=dtype)
    expected = [layer[:written] for tier in Tier for layer in pools.tensors[tier]]
    assert zeroed == [(layer.data_ptr(), layer.nbytes, 3) for layer in expected]
    for tensor in pools.tensors.values():
        assert not tensor[:, :written].any() and (tensor[:, written:] == 7).all()


def test_beside_a_gpu_they_zero_the_cpu_tier_alone(model_dir: Path, zeroed) -> None:
    with fake_gpu(0):
        pools = write(model_dir, 20, on_gpu=True)
    assert zeroed == [(layer.data_ptr(), layer[:20].nbytes, 3) for layer in pools.tensors[Tier.CPU]]
    assert not pools.tensors[Tier.CPU][:, :20].any()


@pytest.mark.parametrize("has_gpu", [False, True])
def test_all_pages_of_host_memory_lie_on_all_nodes_in_turn(model_dir: Path, monkeypatch, has_gpu: bool) -> None:
    """Those of blocks that are not written before serving, too."""
    spread: list[tuple[int, int]] = []
    monkeypatch.setattr("swiftllm.kv.tensors.spread_over_nodes", lambda *mapping: spread.append(mapping))
    config = EngineConfig(str(model_dir), dtype="float32", num_gpu_blocks=4, num_cpu_blocks=9, max_model_len=32)
    with fake_gpu(0) if has_gpu else nullcontext():
        pools = open_torch_backend(config).kv_pools
    on_host = [pools.tensors[tier] for tier in ((Tier.CPU,) if has_gpu else (Tier.GPU, Tier.CPU))]
    assert spread == [(tensor.data_ptr(), tensor.nbytes) for tensor in on_host]
