"""A GPU as the engine opens it, and one that hangs: waits, steps, recoveries and servers end with a clear error."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from apex.build import build_system
from apex.strategy import StrategyConfig
from swiftllm.config import EngineConfig
from swiftllm.core.request import SamplingParams
from swiftllm.device import (
    ALLOCATOR_VARIABLES,
    CONTEXT_BYTES,
    DEVICE_HEADROOM,
    GRAPHS_SHARE,
    CudaDevice,
    DeviceHung,
    cublas_workspace_bytes,
    open_device,
)
from swiftllm.engine.engine import Engine
from swiftllm.server.engine_process import EngineService
from swiftllm.server.messages import NewRequest
from tests.reference.fake_device import FakeCuda
from tests.reference.fake_engine import flat_table
from tests.reference.fake_gpu import OWN_CARD, fake_gpu
from tests.swiftllm.server.serving import LocalClient, Outcome, read_all, run_client

SAMPLING = SamplingParams(max_tokens=12, ignore_eos=True)
PROMPTS = [[5, 6, 7], [8, 9], [3, 4, 5, 6, 7, 8, 9], [11, 12, 13, 14]]
SYSTEMS = {
    "swiftllm": None,
    "neo": StrategyConfig(strategy="asymmetric-pipelining"),
    "apex": StrategyConfig(strategy="asynchronous-overlap"),
}


@pytest.fixture(autouse=True)
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swiftllm.device.ANSWER_S", 0.05)


@pytest.fixture(scope="module")
def model_dir(tiny_model_dir: Callable[..., Path]) -> Path:
    return tiny_model_dir(num_hidden_layers=2)


def make_engine(model_dir: Path, system: str) -> Engine:
    """A GPU tier of 8 blocks, so that most requests decode on the CPU where the system can."""
    config = EngineConfig(
        str(model_dir), dtype="float32", block_size=4, num_gpu_blocks=8, num_cpu_blocks=40,
        max_num_batched_tokens=24, max_num_seqs=4, max_model_len=32,
    )  # fmt: skip
    return build_system(system, config, SYSTEMS[system], profile=flat_table(cpu_token_s=2e-6))


def test_sums_of_16_bit_products_are_added_in_32_bits() -> None:
    how = torch.backends.cuda.matmul
    names = [f"allow_{dtype}_reduced_precision_reduction" for dtype in ("fp16", "bf16")]
    before = [getattr(how, name) for name in names]
    try:
        for name in names:
            setattr(how, name, True)
        with FakeCuda(0):
            CudaDevice()
        assert not any(getattr(how, name) for name in names)
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(how, name, value)


def test_what_a_gpu_does_not_hold_is_refused() -> None:
    with FakeCuda(0, total_bytes=1000):
        held = torch.empty(600, dtype=torch.uint8, device="meta")
        with pytest.raises(torch.cuda.OutOfMemoryError):
            torch.empty(600, dtype=torch.uint8, device="meta")
        del held
        torch.empty(600, dtype=torch.uint8, device="meta")


def test_a_wait_for_a_gpu_that_hangs_ends_and_later_ones_end_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeCuda(0) as cuda:
        stream = CudaDevice().compute
        stream.mark().synchronize()
        cuda.hang()
        for _ in range(2):
            with pytest.raises(DeviceHung, match=r"the GPU has not finished its work within 0\.05 s"):
                stream.mark().synchronize()
        monkeypatch.setattr("swiftllm.device.ANSWER_S", 3600.0)
        with pytest.raises(DeviceHung):
            stream.mark().synchronize()
        cuda.is_hung = False  # it was slow
        stream.mark().synchronize()


def tokens_of(engine: Engine) -> list[list[int]]:
    """Of all requests, once they are done; the blocks of both tiers are free again."""
    requests = list(engine.state.requests.values())
    while engine.has_unfinished():
        engine.step()
    engine.kv.check_blocks()
    assert all(pool.num_used == 0 for pool in engine.kv.block_pools.values())
    return [request.output_token_ids for request in sorted(requests, key=lambda request: request.request_id)]


def start(model_dir: Path, system: str) -> Engine:
    engine = make_engine(model_dir, system)
    for index, prompt in enumerate(PROMPTS):
        engine.add(engine.make_request(str(index), prompt, SAMPLING))
    return engine


@pytest.mark.parametrize(("system", "can_capture"), [("swiftllm", True), ("neo", False), ("apex", True)])
def test_a_step_and_a_recovery_on_a_gpu_that_hangs_end(model_dir: Path, system: str, can_capture: bool) -> None:
    """If it answers again, the next recovery leads to the same tokens."""
    expected = tokens_of(start(model_dir, "swiftllm"))
    with fake_gpu(1, can_capture=can_capture) as cuda:
        engine = start(model_dir, system)
        for _ in range(4):
            engine.step()
        cuda.hang()
        with pytest.raises(DeviceHung):
            for _ in range(100):
                engine.step()
        with pytest.raises(DeviceHung):
            engine.recover()
        cuda.is_hung = False
        for request in engine.recover():
            engine.add(request, check_targets=False)
        assert tokens_of(engine) == expected
        cuda.hang()
        engine.close()


def test_a_server_on_a_gpu_that_hangs_fails_its_requests_and_says_why(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes: dict[str, Outcome] = {}

    async def client(local: LocalClient) -> None:
        requests = [NewRequest(str(i), prompt, SAMPLING) for i, prompt in enumerate(PROMPTS)]
        outcomes.update(await read_all(local.submit(requests)))

    with fake_gpu(1) as cuda:
        engine = make_engine(model_dir, "apex")

        def on_its_thread(work: Callable[[], object]) -> Callable[[], object]:
            @wraps(work)
            def run() -> object:
                with cuda.another_thread(OWN_CARD):
                    return work()

            return run

        for name in ("step", "recover"):
            monkeypatch.setattr(engine, name, on_its_thread(getattr(engine, name)))
        service = EngineService(engine)
        after_a_step = SimpleNamespace(on_step=lambda *_: cuda.hang(), on_finish=lambda *_: None)
        service.add_observer(after_a_step)
        run_client(service, client)
        health = service.health
    assert {outcome.error.reason for outcome in outcomes.values()} == {"engine_error"}
    assert all("the GPU has not finished its work within" in str(outcome.error) for outcome in outcomes.values())
    assert health.status == "failed" and "the GPU has not finished its work" in health.reason


def test_a_share_of_a_card_has_its_part_of_the_memory_less_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may not have taken theirs yet, so what is free now says nothing."""
    total = 8 << 30
    with FakeCuda(0, total_bytes=total):
        device = CudaDevice()
        whole = device.free_bytes()
        monkeypatch.setattr("swiftllm.device.card_share", lambda: 0.25)
        reserved = torch.cuda.memory_reserved(device.torch_device)
        workspace = cublas_workspace_bytes(8)
        assert device.free_bytes() == total // 4 - reserved - CONTEXT_BYTES < whole
        assert CudaDevice().graph_bytes == int(GRAPHS_SHARE * total / 4)
        left = device.left_free(lambda: torch.empty(1 << 20, dtype=torch.uint8, device="meta"))
        assert left == int(device.free_bytes() - (1 << 20) - DEVICE_HEADROOM * total / 4) - workspace


def allocator_settings() -> str:
    return torch._C._accelerator_getAllocatorSettings()


@pytest.fixture
def own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    torch._C._accelerator_setAllocatorSettings("")


def test_segments_of_memory_grow_where_one_process_computes(own_settings, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with FakeCuda(0):
        open_device("cuda")
        assert allocator_settings() == "expandable_segments:True"
        open_device("cuda", 1, in_group=True)
        assert allocator_settings() == "expandable_segments:False"


@pytest.mark.parametrize("name", ALLOCATOR_VARIABLES)
def test_a_user_s_settings_of_the_allocator_stay(own_settings, monkeypatch, name) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:64")
    with FakeCuda(0):
        CudaDevice()
    assert allocator_settings() == ""


def test_segments_do_not_grow_where_the_driver_cannot_map_memory(own_settings, caplog) -> None:
    with FakeCuda(0) as cuda:
        cuda.has_virtual_memory = False
        CudaDevice()
    assert allocator_settings() == "expandable_segments:False"
    assert "operation not supported" in caplog.text


@pytest.mark.parametrize(("major", "mib"), [(7, 8.125), (8, 8.125), (9, 32), (10, 32), (12, 32)])
def test_the_workspace_of_cublas_is_torch_s_default(major, mib) -> None:
    assert cublas_workspace_bytes(major) == mib * 2**20


def test_what_is_sent_is_contiguous_on_the_device() -> None:
    """A copy of anything else would wait for all work on the stream."""
    with FakeCuda(0):
        stream = CudaDevice().compute
        sent = stream.send(torch.ones(3, 4).T)
        assert sent.shape == (4, 3) and sent.is_contiguous()
        assert stream.send(torch.ones(0, 4)).shape == (0, 4)


def test_memory_stays_page_locked_as_long_as_there_is_a_view() -> None:
    """Under torch.inference_mode a view does not keep the tensor that it is a view of."""
    with FakeCuda(0) as cuda:
        device = CudaDevice()
        for mode in (torch.inference_mode, torch.no_grad):
            with mode():
                part = device.mapped((64,), torch.uint8).split(16)[1][4:]
            gc.collect()
            assert cuda.runtime.mapped, mode.__name__
            del part
            gc.collect()
            assert not cuda.runtime.mapped, mode.__name__
