"""For the tests of the server: a tiny chat model behind a running server, and the same model offline."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from swiftllm.llm import LLM
from swiftllm.server.engine_process import EngineService
from swiftllm.server.messages import ServiceLimits
from swiftllm.server.settings import ServerSettings
from tests.reference.tiny_model import make_tiny_llama
from tests.reference.tiny_tokenizer import make_tiny_tokenizer
from tests.swiftllm.server.http_server import RunningServer, running


@pytest.fixture(scope="session")
def tiny_chat_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer and a chat template."""
    return make_tiny_tokenizer(make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-chat"))


OPTIONS = dict(device="cpu", dtype="float32", num_gpu_blocks=64, num_cpu_blocks=64, cpu_threads=1)


@pytest.fixture(scope="session")
def llm(tiny_chat_dir: Path) -> Iterator[LLM]:
    """The offline twin of :func:`server`."""
    offline = LLM(str(tiny_chat_dir), **OPTIONS)
    yield offline
    offline.close()


@pytest.fixture(scope="session")
def server(tiny_chat_dir: Path) -> Iterator[RunningServer]:
    """The tiny model behind HTTP, for tests that leave nothing behind."""
    engine = LLM(str(tiny_chat_dir), **OPTIONS).engine
    service = EngineService(engine, ServiceLimits(max_queued_requests=64))
    with running(service, ServerSettings()) as running_server:
        yield running_server
    engine.kv.check_blocks()
