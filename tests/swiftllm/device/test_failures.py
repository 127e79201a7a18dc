"""A GPU on which a kernel has failed: the error comes late, and then from every call until the process ends. Requests
end with it, nothing hangs, no token is made of what was not computed, and engines close."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from swiftllm.device import CudaDevice
from swiftllm.engine.engine import Engine
from swiftllm.processes import DeviceThread
from swiftllm.server.client import ServiceStopping
from swiftllm.server.engine_process import EngineService
from swiftllm.server.messages import NewRequest
from tests.reference.fake_device import FAULT, FakeCuda
from tests.reference.fake_gpu import OWN_CARD, fake_gpu
from tests.reference.fake_streams import DEVICE
from tests.swiftllm.runtime.test_streams import SYSTEMS, make_engine, prompts, sampling
from tests.swiftllm.server.serving import LocalClient, Outcome, read_all, run_client

LENGTHS = (7, 19, 3, 22, 12, 15)
MOST_STEPS = 2000


@pytest.fixture(scope="module")
def model_dir(tiny_model_dir: Callable[..., Path]) -> Path:
    return tiny_model_dir(num_hidden_layers=2)


def start(model_dir: Path, variant: str, synchronous: bool = False) -> Engine:
    engine = make_engine(model_dir, variant, synchronous)
    for index, prompt in enumerate(prompts(LENGTHS)):
        engine.add(engine.make_request(str(index), prompt, sampling(index)))
    return engine


def tokens_of(engine: Engine) -> list[list[int]]:
    requests = list(engine.state.requests.values())
    for _ in range(MOST_STEPS):
        if not engine.has_unfinished():
            break
        engine.step()
    return [request.output_token_ids for request in sorted(requests, key=lambda request: request.request_id)]


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> list[list[int]]:
    engine = start(model_dir, "swiftllm")
    tokens = tokens_of(engine)
    engine.close()
    return tokens


def test_an_error_comes_late_and_then_from_every_call() -> None:
    with FakeCuda(3) as cuda:
        device = CudaDevice()
        tensor = torch.zeros(4, device=DEVICE)
        before = device.compute.mark()
        before.synchronize()
        cuda.fail_after(0)
        tensor.add_(1)  # its launch tells nothing
        event = torch.cuda.Event()
        with pytest.raises(torch.AcceleratorError, match=FAULT):
            torch.cuda.synchronize()
        calls: dict[str, Callable[[], object]] = {
            "synchronise": torch.cuda.synchronize,
            "query": before.done,
            "wait for an event": before.synchronize,
            "record": lambda: event.record(cuda.compute),
            "wait": lambda: device.swap.wait(before),
            "launch": lambda: tensor.add_(1),
            "allocate": lambda: torch.empty(4, device=DEVICE),
            "allocate pinned": lambda: device.pinned((4,), torch.float32),
            "map": lambda: device.mapped((4,), torch.float32),
            "copy": lambda: device.compute.fetch(tensor),
            "read": tensor.tolist,
            "new stream": device.new_stream,
            "memory": device.free_bytes,
            "capture": lambda: device.capture(lambda: None),
            "choose a GPU": lambda: torch.cuda.set_device(OWN_CARD),
        }
        for name, call in calls.items():
            with pytest.raises(torch.AcceleratorError, match=FAULT):
                call()
                raise AssertionError(name)
        assert not cuda.capturing


def faults(model_dir: Path, variant: str, synchronous: bool, can_capture: bool) -> Iterator[int]:
    """How many kernels come before the one that fails, from the first to the last of a run."""
    with fake_gpu(5, can_capture=can_capture) as cuda:
        engine = start(model_dir, variant, synchronous)
        cuda.fail_after(most := 10**9)
        tokens_of(engine)
        torch.cuda.synchronize()
        num_kernels = most - cuda.kernels_left
        engine.close()
    draw = random.Random(variant)
    return (draw.randrange(num_kernels * part // 4, num_kernels * (part + 1) // 4) for part in range(4))


@pytest.mark.parametrize(
    ("variant", "synchronous", "can_capture"),
    [
        ("swiftllm", False, True),
        ("swiftllm", True, False),
        ("neo", False, True),
        ("fastdecode", False, False),
        ("overlap", False, True),
        ("overlap", True, False),
    ],
)
def test_an_engine_raises_gives_no_token_and_closes(model_dir, expected, variant, synchronous, can_capture) -> None:
    before = {*threading.enumerate()}  # other tests' too
    for fault in faults(model_dir, variant, synchronous, can_capture):
        with fake_gpu(5, can_capture=can_capture) as cuda:
            engine = start(model_dir, variant, synchronous)
            requests = list(engine.state.requests.values())
            cuda.fail_after(fault)
            with pytest.raises(torch.AcceleratorError, match=FAULT):
                tokens_of(engine)
                torch.cuda.synchronize()  # the last kernels give nobody a token
                raise AssertionError("nothing failed")
            for _ in range(2):
                with pytest.raises(torch.AcceleratorError, match=FAULT):
                    engine.recover()
            engine.kv.check_blocks()
            engine.close()
        for request, tokens in zip(requests, expected, strict=True):
            assert request.output_token_ids == tokens[: request.output_len]
    assert not [thread for thread in {*threading.enumerate()} - before if thread.name == "cpu-attention"]


@pytest.mark.parametrize("variant", SYSTEMS)
def test_a_server_fails_its_requests_says_why_and_refuses_others(model_dir, expected, variant, monkeypatch) -> None:
    outcomes: dict[str, Outcome] = {}
    late = NewRequest("late", (3, 4), sampling(0))

    async def client(local: LocalClient) -> None:
        requests = [NewRequest(str(i), tuple(prompt), sampling(i)) for i, prompt in enumerate(prompts(LENGTHS))]
        outcomes.update(await read_all(local.submit(requests)))
        with pytest.raises(ServiceStopping, match="the engine has failed"):
            local.submit([late])

    with fake_gpu(1, can_capture=variant != "neo") as cuda:
        engine = make_engine(model_dir, variant)

        def on_its_thread(work: Callable[[], object]) -> Callable[[], object]:
            @wraps(work)
            def run() -> object:
                with cuda.another_thread(OWN_CARD):
                    return work()

            return run

        for name in ("step", "recover", "close"):
            monkeypatch.setattr(engine, name, on_its_thread(getattr(engine, name)))
        service = EngineService(engine)
        steps = iter(range(MOST_STEPS))

        def on_step(*_: object) -> None:
            if next(steps) == 3:
                cuda.fail_after(20)

        service.add_observer(SimpleNamespace(on_step=on_step, on_finish=lambda *_: None))
        run_client(service, client)
    assert service.health.status == "failed" and FAULT in service.health.reason
    failed = [outcome for outcome in outcomes.values() if outcome.error is not None]
    assert failed and {outcome.error.reason for outcome in failed} == {"engine_error"}
    assert all(FAULT in str(outcome.error) for outcome in failed)
    for index, tokens in enumerate(expected):
        outcome = outcomes[str(index)]
        assert outcome.token_ids == tokens[: len(outcome.token_ids)]


@pytest.mark.parametrize("part", [0.01, 0.5, 0.99])
@pytest.mark.filterwarnings("ignore:kernels are launched one by one")
def test_a_start_ends_with_the_error(model_dir, part) -> None:
    with fake_gpu(2) as cuda:
        cuda.fail_after(most := 10**9)
        make_engine(model_dir, "overlap").close()
        torch.cuda.synchronize()
        num_kernels = most - cuda.kernels_left
    with fake_gpu(2) as cuda, pytest.raises(torch.AcceleratorError, match=FAULT):
        torch.cuda.set_device(OWN_CARD)
        cuda.fail_after(int(part * num_kernels))
        make_engine(model_dir, "overlap")
        torch.cuda.synchronize()  # the last kernels of a start are waited for by the first step


def test_threads_run_that_end_a_process_whose_gpu_has_failed() -> None:
    ran = threading.Event()
    with FakeCuda(0) as cuda:
        torch.cuda.set_device(OWN_CARD)
        thread = DeviceThread(ran.set, name="end")
        cuda.has_failed = True
        thread.start()
        thread.join()
    assert ran.is_set()
