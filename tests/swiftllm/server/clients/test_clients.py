"""Every client that is installed, with all that scripts/try_clients.sh tries it with, against a tiny model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module

import pytest

from scripts.clients.shared import Server
from swiftllm.llm import LLM
from swiftllm.server.engine_process import EngineService, ServiceLimits
from swiftllm.server.settings import ServerSettings
from tests.reference.tiny_model import make_tiny_llama
from tests.reference.tiny_tokenizer import make_tiny_tokenizer
from tests.swiftllm.server.http_server import running

MODULES = {
    "openai": "openai",
    "openai_agents": "agents",
    "langchain": "langchain_openai",
    "llama_index": "llama_index.llms.openai_like",
    "instructor": "instructor",
    "pydantic_ai": "pydantic_ai",
    "litellm": "litellm",
    "anthropic": "anthropic",
}


TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=4096)
    make_tiny_tokenizer(folder)
    options = dict(device="cpu", dtype="float32", num_gpu_blocks=600, num_cpu_blocks=64, cpu_threads=1)
    service = EngineService(LLM(str(folder), **options).engine, ServiceLimits(max_queued_requests=64))
    template = folder / "any_role.jinja"  # the model's own has none for tools
    template.write_text(TEMPLATE)
    with running(service, ServerSettings(chat_template=str(template), tool_call_parser="json")) as server:
        yield Server(server.url, "tiny")


@pytest.mark.parametrize("client", MODULES)
def test_a_client_gets_what_it_expects(server: Server, client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(MODULES[client])
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for check in import_module(f"scripts.clients.use_{client}").CHECKS:
        passes(check, server)


def passes(check: Callable[[Server], None], server: Server, attempts: int = 4) -> None:
    """A model of random weights may happen to say nothing: in one answer of some fifty."""
    for attempt in range(attempts):
        try:
            return check(server)
        except Exception:
            if attempt == attempts - 1:
                raise
