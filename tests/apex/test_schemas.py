"""Random JSON schemas under every system: what ends by itself is valid."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from apex.build import build_system
from swiftllm.config import EngineConfig
from swiftllm.core.request import SamplingParams
from swiftllm.engine.engine import Engine
from swiftllm.model.tokenizer import Tokenizer
from swiftllm.sampling.grammar import GrammarCompiler
from swiftllm.sampling.trial import TriedGrammar
from swiftllm.server.engine_process import EngineService
from swiftllm.server.messages import NewRequest, ServiceLimits
from tests.apex.test_end_to_end import MADE_UP_PROFILE, VARIANTS
from tests.reference.random_schemas import Schema, random_schema
from tests.reference.tiny_model import make_tiny_llama
from tests.reference.tiny_tokenizer import make_tiny_tokenizer
from tests.swiftllm.server.http_server import RunningServer, running
from tests.swiftllm.server.serving import LocalClient, read_all, with_service

jsonschema = pytest.importorskip("jsonschema")

POOLS = {"block_size": 4, "num_gpu_blocks": 44, "num_cpu_blocks": 44}  # four requests of the longest


def engine_of(model_dir: Path, variant: str, killed_tasks: range) -> Engine:
    """An engine with tiny pools, whose CPU worker dies in its tasks of these numbers."""
    system, strategy, synchronous = VARIANTS[variant]
    options = {"device": "cpu", "dtype": "float32", "max_num_batched_tokens": 48, "synchronous": synchronous}
    config = EngineConfig(str(model_dir), **options, **POOLS)
    engine = build_system(system, config, strategy, profile=MADE_UP_PROFILE)
    if engine.backend.cpu_tier is not None and killed_tasks:
        worker, numbers = engine.backend.cpu_tier.worker, itertools.count(1)
        submit = worker.submit

        def deadly(*task: object) -> object:
            if next(numbers) in killed_tasks:
                worker.kill()
            return submit(*task)

        worker.submit = deadly
    return engine


def some_prompt(draw: random.Random) -> list[int]:
    return draw.choices(range(3, 128), k=draw.randint(1, 40))


def happened(service: EngineService) -> Counter[str]:
    return Counter(preemptions=service.engine.stats().preemptions, restarts=service.snapshot().worker_restarts)


def serve_schemas(model_dir: Path, variant: str, schemas: list[Schema], seed: int, killed_tasks: range) -> Counter[str]:
    """Outputs for ``schemas`` in tiny pools, by what became of them, with preemptions and restarts of the CPU worker.

    Raises:
        ValidationError: one has ended by itself and is not valid.
    """
    draw, requests = random.Random(seed), []
    for number, schema in enumerate(schemas):
        grammar = TriedGrammar(("json_schema", json.dumps(schema)))
        sampling = SamplingParams(120, temperature=1.0, seed=seed + number, grammar=grammar)
        requests.append(NewRequest(f"r{number}", tuple(some_prompt(draw)), sampling))
    outcomes = {}

    async def client(front: LocalClient) -> None:  # requests of one submission have one grammar
        outcomes.update(await read_all([front.submit([new])[0] for new in requests]))

    engine = engine_of(model_dir, variant, killed_tasks)
    service = with_service(engine, client, ServiceLimits(max_queued_requests=len(requests)))
    tokenizer, found = Tokenizer.from_folder(model_dir), Counter[str]()
    for schema, new in zip(schemas, requests, strict=True):
        outcome = outcomes[new.request_id]
        found[outcome.finish_reason or f"failed: {outcome.error}"] += 1
        if outcome.finish_reason == "stop":
            jsonschema.validate(json.loads(tokenizer.decode(outcome.token_ids)), schema)
    return found + happened(service)


def stream_schemas(
    model_dir: Path, variant: str, schemas: list[Schema], seed: int, killed_tasks: range
) -> Counter[str]:
    """What :func:`serve_schemas` does, of texts that a server streams."""
    service = EngineService(
        engine_of(model_dir, variant, killed_tasks), ServiceLimits(max_queued_requests=len(schemas))
    )

    def read_stream(server: RunningServer, number: int, schema: Schema) -> str:
        fields = {"max_tokens": 120, "seed": seed + number, "stream": True, "structured_outputs": {"json": schema}}
        text, reason = "", None
        body = {"prompt": some_prompt(random.Random(seed + number)), **fields}
        with server.http.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    text, reason = text + choice["text"], choice["finish_reason"]
        if reason == "stop":
            jsonschema.validate(json.loads(text), schema)
        return reason or f"failed: {answer.status_code}"

    with running(service) as server, ThreadPoolExecutor(16) as pool:
        found = Counter(pool.map(partial(read_stream, server), range(len(schemas)), schemas))
        return found + happened(service)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_tokenizer(make_tiny_llama(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def compiler(model_dir: Path) -> GrammarCompiler:
    return GrammarCompiler(Tokenizer.from_folder(model_dir), 128, [2])


def is_taken(compiler: GrammarCompiler, schema: Schema) -> bool:
    with suppress(ValueError):
        return bool(compiler.compile("json_schema", schema))
    return False


@pytest.mark.parametrize("serve", [serve_schemas, stream_schemas])
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_ends_by_itself_is_valid(model_dir: Path, compiler: GrammarCompiler, variant: str, serve) -> None:
    draw = random.Random(variant)
    schemas = [schema for _ in range(16) if is_taken(compiler, schema := random_schema(draw))][:12]
    found = serve(model_dir, variant, schemas, 1, range(9, 100, 40))
    assert found["stop"] + found["length"] == 12 and found["stop"] > 3, found
