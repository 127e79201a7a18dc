"""Sends thousands of valid, invalid and cancelled requests to a real server, and kills its CPU worker in the middle.

Every request must get an answer or a documented error. At the end the server must be idle with empty pools.

    python evaluation/soak.py [--help]

The server is the product's own, in a separate process: a tiny model with random weights, and pools too small for the
load, so that requests wait, swap, and are recomputed and refused. Half of the requests are best-effort. The clients run
in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if __name__ == "__main__" and not __package__:  # run as a file
    import here

import httpx

from apex.cli.parser import parse_options
from evaluation.measure.processes import stop_on_sigterm
from evaluation.measure.server import LaunchedServer, ServerCommand, launched_server
from evaluation.results.paths import REPO_ROOT
from evaluation.results.progress import format_s
from swiftllm.config import EngineConfig
from swiftllm.server.service.limits import ServiceLimits
from swiftllm.server.settings import ServerSettings

if TYPE_CHECKING:
    from swiftllm.server.service.service import EngineService

# -- requests: valid, invalid and cancelled ones ----------------------------------------------------------------------

MAX_PROMPT_TOKENS, MAX_OUTPUT_TOKENS = 60, 24
HURRY_S = 0.002
"""Deadline in seconds of requests that should miss it."""
TWO_PROMPTS = ["one of them", "and the other"]
SERVED, HUNG_UP = "served", "hung up"
QUEUE_FULL, OUT_OF_REACH = "429 queue_full", "429 slo_unattainable"


class Unexpected(Exception):
    """The server behaved wrongly; the message says how."""


@dataclass(frozen=True)
class SoakRequest:
    """One request. ``ends`` are the ways in which it may end; a refusal for now (429) is always allowed.

    The client disconnects after ``hang_up_after`` events of a stream, or after ``hang_up_s`` seconds. ``tokens`` are
    output tokens that the usage must report, if the output length is forced.
    """

    kind: str
    body: bytes
    ends: tuple[str, ...] = (SERVED,)
    path: str = "/v1/completions"
    tokens: int | None = None
    hang_up_after: int | None = None
    hang_up_s: float | None = None


@dataclass
class RequestSource:
    """Draws random requests for a server with this vocabulary size and maximum length (tokens)."""

    model: str
    vocab_size: int
    max_model_len: int
    rng: random.Random = field(default_factory=random.Random)

    def next_request(self) -> SoakRequest:
        """A request of a random kind, drawn by the weights in KINDS."""
        (kind,) = self.rng.choices(list(KINDS), [kind.weight for kind in KINDS.values()])
        return self.request(kind)

    def request(self, kind: str) -> SoakRequest:
        return SoakRequest(kind, ends=KINDS[kind].ends, **KINDS[kind].draw(self))

    def prompt(self, length: int | None = None) -> list[int]:
        return self.rng.choices(range(self.vocab_size), k=length or self.rng.randint(1, MAX_PROMPT_TOKENS))

    def fields(self, **others: Any) -> dict[str, Any]:
        sampled = {"temperature": 0.8, "top_p": 0.9, "seed": self.rng.randrange(1000)}
        how = self.rng.choice([{"temperature": 0.0}, sampled, {**sampled, "logprobs": 2}])
        of_class = self.rng.choice([{}, {"service_tier": "auto"}, {"service_tier": "flex"}, {"priority": 3}])
        wanted = {"max_tokens": self.rng.randint(1, MAX_OUTPUT_TOKENS), "ignore_eos": True}
        return {"model": self.model, "prompt": self.prompt(), **wanted, **how, **of_class, **others}

    def asked(self, **fields: Any) -> dict[str, Any]:
        """A request whose number of tokens is not checked, as fields of a SoakRequest."""
        return {"body": packed(self.fields(**fields))}

    def served(self, outputs: int = 1, **fields: Any) -> dict[str, Any]:
        """A request that must get ``outputs`` times its tokens, as fields of a SoakRequest."""
        drawn = self.fields(**fields)
        return {"body": packed(drawn), "tokens": outputs * drawn["max_tokens"]}

    def plain(self) -> dict[str, Any]:
        prompt = self.rng.choice([self.prompt(), "tell me why", TWO_PROMPTS])
        return self.served(2 if prompt is TWO_PROMPTS else 1, prompt=prompt)

    def structured(self) -> dict[str, Any]:
        number = self.rng.randint(1, 9)
        grammar: dict[str, Any] = self.rng.choice(
            [
                {"structured_outputs": {"regex": f"[a-z]{{1,{number}}}"}},
                {"structured_outputs": {"choice": ["yes", "no", str(number)]}},
                {"response_format": {"type": "json_object"}},
            ]
        )
        return self.asked(stream=self.rng.random() < 0.5, ignore_eos=False, **grammar)

    def with_tools(self) -> dict[str, Any]:
        """A chat whose answer must call a tool; the call may be cut."""
        parameters = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        drawn = self.fields(tools=[tool], tool_choice="required", stream=self.rng.random() < 0.5, ignore_eos=False)
        del drawn["prompt"]
        drawn["logprobs"] = False
        drawn["messages"] = [{"role": "user", "content": "tell me why"}]
        return {"body": packed(drawn), "path": "/v1/chat/completions"}

    def malformed(self) -> dict[str, Any]:
        whole = packed(self.fields())
        broken = [b"", whole[: self.rng.randrange(len(whole))], b"[1, 2", b"\xff\xfe", packed({"model": self.model})]
        return {"body": self.rng.choice([*broken, *(packed(self.fields(**fields)) for fields in WRONG_FIELDS)])}


def packed(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields).encode()


WRONG_FIELDS: tuple[dict[str, Any], ...] = (
    {"prompt": []}, {"prompt": {"a": 1}}, {"max_tokens": "ten"}, {"max_tokens": 0}, {"temperature": -1.0}, {"n": 0},
    {"service_tier": "gold"}, {"service_tier": "priority", "priority": 1},
)  # fmt: skip


@dataclass(frozen=True)
class RequestKind:
    """A kind of request: how often it comes, its fields, and how it may end."""

    weight: float
    draw: Callable[[RequestSource], dict[str, Any]]
    ends: tuple[str, ...] = (SERVED,)


LEFT = (HUNG_UP, SERVED)
KINDS = {
    "plain": RequestKind(28, RequestSource.plain),
    "stream": RequestKind(28, lambda s: s.served(stream=True, stream_options={"include_usage": True})),
    "several outputs": RequestKind(4, lambda s: s.served(3, n=3)),
    "structured": RequestKind(4, RequestSource.structured),
    "tools": RequestKind(4, RequestSource.with_tools),
    "stream, hung up": RequestKind(12, lambda s: s.asked(stream=True) | {"hang_up_after": s.rng.randint(1, 4)}, LEFT),
    "plain, hung up": RequestKind(8, lambda s: s.asked() | {"hang_up_s": s.rng.uniform(0.0, 0.1)}, LEFT),
    "deadline": RequestKind(
        4,
        lambda s: s.asked(timeout=HURRY_S, stream=s.rng.random() < 0.5),
        (SERVED, "504 deadline", "stream: deadline"),
    ),
    "too long": RequestKind(
        4,
        lambda s: s.asked(prompt=s.prompt(s.max_model_len + s.rng.randint(0, 50))),
        ("400 context_length_exceeded",),
    ),
    "wrong model": RequestKind(3, lambda s: s.asked(model="another"), ("404 model_not_found",)),
    "unknown token": RequestKind(
        2, lambda s: s.asked(prompt=[s.vocab_size + s.rng.randrange(1000)]), ("400 request_refused",)
    ),
    "malformed": RequestKind(6, RequestSource.malformed, ("400 invalid_value",)),
    "wrong path": RequestKind(1, lambda s: {"body": b"{}", "path": "/v1/nothing"}, ("404 None",)),
}


async def send_request(client: httpx.AsyncClient, request: SoakRequest) -> str:
    """Send a request, wait for its end, and return how it ended.

    Raises:
        Unexpected: it ended in a way that is not allowed, or its answer is incomplete.
        httpx.HTTPError: the connection failed.
    """
    try:
        async with asyncio.timeout(request.hang_up_s):
            end = await read_answer(client, request)
    except TimeoutError:
        end = HUNG_UP
    if end not in (*request.ends, QUEUE_FULL, OUT_OF_REACH):
        raise Unexpected(f"{request.kind}: {end}; body {request.body[:200]!r}")
    return end


async def read_answer(client: httpx.AsyncClient, request: SoakRequest) -> str:
    headers = {"Content-Type": "application/json"}
    async with client.stream("POST", request.path, content=request.body, headers=headers) as response:
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            return await read_events(response, request)
        body = json.loads(await response.aread())
    if not response.is_success:
        return f"{response.status_code} {body['error']['code']}"
    check_tokens(request, body["usage"])
    return SERVED


async def read_events(response: httpx.Response, request: SoakRequest) -> str:
    usage, count = None, 0
    async for line in response.aiter_lines():
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            check_tokens(request, usage)
            return SERVED
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            return f"stream: {event['error']['code']}"
        usage = event.get("usage") or usage
        count += 1
        if count == request.hang_up_after:
            return HUNG_UP
    raise Unexpected(f"{request.kind}: the stream ended after {count} events without [DONE]")


def check_tokens(request: SoakRequest, usage: Mapping[str, int] | None) -> None:
    if request.tokens is not None and (usage is None or usage["completion_tokens"] != request.tokens):
        raise Unexpected(f"{request.kind}: usage {usage} where {request.tokens} tokens were asked for")


# -- the command ------------------------------------------------------------------------------------------------------

CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}{{ tools | length }}"
TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 256,
}  # fmt: skip
MAX_MODEL_LEN = 128
POOLS = {"num_gpu_blocks": 12, "num_cpu_blocks": 24}
MAX_QUEUED = 40
READY_TIMEOUT_S = 120.0
REQUEST_TIMEOUT_S = 60.0
IDLE_TIMEOUT_S = 30.0
REPORTS = 20
WARM = 0.25
"""Fraction of the run after which memory must not grow: by then every code path has run many times."""
MEMORY_FROM = 8_000
"""Requests of the shortest run whose memory growth is checked. Caches and allocators fill during the first two
thousand, which must be less than a quarter of the run."""
SHOWN_PROBLEMS = 10


@dataclass(frozen=True)
class Options:
    """Soak-test a server. Exit status 0: nothing unexpected happened, and the server ended idle with empty pools."""

    requests: int = 20_000
    """Number of requests to send."""
    concurrency: int = 32
    """Number of requests in flight."""
    memory_allowance_mib: float = 32.0
    """How much (MiB) the server's resident memory may grow over the last three quarters of the run.
    Checked in runs of at least 8,000 requests: caches and allocators fill during the first two thousand."""
    seed: int = 0
    """Seed of all requests."""
    system: Literal["apex", "omniserve", "omniserve-stepping"] = "apex"
    """System of the server. Those with targets may also refuse latency-sensitive requests for them."""


@dataclass
class SoakReport:
    """The result of a soak."""

    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    resident_mib: list[float] = field(default_factory=list)
    worker_restarts: int = 0
    preemptions: int = 0
    swapped_blocks: int = 0
    seconds: float = 0.0


# -- the server's process ---------------------------------------------------------------------------------------------


def make_tiny_model(folder: Path) -> None:
    """Write a byte-level model: a config.json (weights are random) and a tokenizer of one token per byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    (folder / "config.json").write_text(json.dumps(TINY))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE})
    )


def serve() -> None:
    """Serve until SIGTERM. SIGUSR1 kills the CPU attention worker, like a crash in native code."""
    from swiftllm.server.run import run_server

    logging.basicConfig(level=logging.WARNING)
    model, system, *_, port = sys.argv[1:]
    signal.signal(signal.SIGUSR1, pass_on)
    run_server(functools.partial(build_service, model, system), ServerSettings(port=int(port), tool_call_parser="json"))


def pass_on(number: int, frame: object) -> None:
    """Send a signal to the engine's process, too."""
    for process in multiprocessing.active_children():
        os.kill(process.pid, number)


def build_service(model: str, system: str) -> EngineService:
    """What the engine's process runs."""
    from apex.strategy import StrategyConfig
    from apex.systems import build_system
    from swiftllm.server.service.service import EngineService

    limits = {"max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": 128, "max_num_seqs": 32}
    config = EngineConfig(
        model, device="cpu", dtype="float32", load_format="dummy", gpu_batch_threads=1, cpu_threads=1, **POOLS, **limits
    )
    # The strategy is forced: on a busy machine the scheduler may decide not to use the CPU.
    engine = build_system(system, config, StrategyConfig(strategy="asynchronous-overlap"))
    worker = engine.backend.cpu_tier.worker
    signal.signal(signal.SIGUSR1, lambda *_: worker.kill())
    limits = ServiceLimits(max_queued_requests=MAX_QUEUED, max_queued_best_effort=MAX_QUEUED)
    return EngineService(engine, limits)


# -- the clients ------------------------------------------------------------------------------------------------------


async def soak(options: Options, running: LaunchedServer, source: RequestSource) -> SoakReport:
    """Send all requests. A failing request does not stop the others."""
    report = SoakReport()
    start_s = time.monotonic()
    left = iter(range(options.requests))
    every = max(1, options.requests // REPORTS)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=options.concurrency)
    client = httpx.AsyncClient(base_url=running.server.url, timeout=REQUEST_TIMEOUT_S, limits=limits, trust_env=False)

    async def one_after_the_other() -> None:
        for number in left:
            if number == options.requests // 2:
                running.process.send_signal(signal.SIGUSR1)
            if number and number % every == 0:
                report.resident_mib.append(running.resident_bytes() / 2**20)
                print_progress(number, options.requests, time.monotonic() - start_s, report)
            asked = source.next_request()
            try:
                report.ends[asked.kind, await send_request(client, asked)] += 1
            except Unexpected as problem:
                report.problems.append(str(problem))
            except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
                report.problems.append(f"{asked.kind}: {type(error).__name__}: {error}; body {asked.body[:200]!r}")

    async with client:
        await asyncio.gather(*(one_after_the_other() for _ in range(options.concurrency)))
        await check_idle_server(client, source, report)
    report.resident_mib.append(running.resident_bytes() / 2**20)
    report.seconds = time.monotonic() - start_s
    return report


def print_progress(number: int, total: int, seconds: float, report: SoakReport) -> None:
    rate = number / seconds
    left = format_s((total - number) / rate)
    text = f"{number}/{total} requests, {rate:.0f}/s, server {report.resident_mib[-1]:.0f} MiB, {left} left"
    print(f"soak: {text}" + (f", {len(report.problems)} problems" if report.problems else ""), flush=True)


async def check_idle_server(client: httpx.AsyncClient, source: RequestSource, report: SoakReport) -> None:
    """Check that the server becomes idle with empty pools, and still serves."""
    deadline_s = time.monotonic() + IDLE_TIMEOUT_S
    while held := held_resources(now := (await client.get("/status.json")).json()["now"]):
        if time.monotonic() > deadline_s:
            report.problems.append(f"{IDLE_TIMEOUT_S:g} s after the last request the server still holds {held}")
            break
        await asyncio.sleep(0.1)
    for name in ("worker_restarts", "preemptions", "swapped_blocks"):
        setattr(report, name, now[name])
    classes, health = now["classes"], await client.get("/health")
    got_none = not all(counts["output_tokens"] for counts in classes.values()) or len(classes) < 2
    faults = {
        "the CPU worker was never restarted: killing it had no effect": not report.worker_restarts,
        f"one of the service classes got no token: {classes}": got_none,
        "the CPU worker has computed nothing, so this soak has tested little": not now["cpu_busy_s"],
        f"the server is not healthy: {health.text}": health.status_code != 200,
    }
    report.problems += [problem for problem, happened in faults.items() if happened]
    try:
        await send_request(client, source.request("plain"))
    except (Unexpected, httpx.HTTPError) as error:
        report.problems.append(f"the server no longer serves: {error}")


def held_resources(now: dict[str, Any]) -> dict[str, int]:
    """The requests and blocks that a server still holds; an idle server should hold none."""
    names = ("waiting", "running_gpu", "running_cpu", "gpu_blocks_used", "cpu_blocks_used")
    return {name: now[name] for name in names if now[name]}


# -- all of it --------------------------------------------------------------------------------------------------------


def run_soak(options: Options) -> SoakReport:
    """Start a server, soak it, stop it.

    Raises:
        ServerNotReady: the server did not start.
    """
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(Path(folder))
        code, log = "from evaluation.soak import serve; serve()", Path(folder) / "log"
        arguments = (sys.executable, "-c", code, folder, options.system)
        command = ServerCommand("soak", arguments, {"PYTHONPATH": str(REPO_ROOT)})
        with launched_server(command, log, READY_TIMEOUT_S) as running:
            source = RequestSource(running.server.model, TINY["vocab_size"], MAX_MODEL_LEN, random.Random(options.seed))
            report = asyncio.run(soak(options, running, source))
            running.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.process.wait(IDLE_TIMEOUT_S)
            if running.process.returncode != 0:
                report.problems.append(f"SIGTERM should drain the server: {running.ended() or 'it has not ended'}")
        print(log.read_text(errors="replace"), end="", file=sys.stderr)
    report.problems += memory_problems(options, report)
    return report


def memory_problems(options: Options, report: SoakReport) -> list[str]:
    """A problem if memory grew too much; none for runs that are too short."""
    grown = growth_mib(report)
    if options.requests < MEMORY_FROM or grown <= options.memory_allowance_mib:
        return []
    return [f"memory grew by {grown:.0f} MiB, more than {options.memory_allowance_mib:g}"]


def growth_mib(report: SoakReport) -> float:
    """Growth of resident memory (MiB) since the first quarter of the run."""
    return report.resident_mib[-1] - report.resident_mib[int(len(report.resident_mib) * WARM)]


def main(options: Options) -> int:
    report = run_soak(options)
    for (kind, end), count in sorted(report.ends.items()):
        print(f"{count:7} {kind}: {end}")
    allowed = f"{options.memory_allowance_mib:g}" if options.requests >= MEMORY_FROM else "any, in so short a run"
    print(
        f"{options.requests} requests in {format_s(report.seconds)}; {report.preemptions} preemptions, "
        f"{report.swapped_blocks} blocks swapped, CPU worker restarted {report.worker_restarts} times; memory "
        f"{report.resident_mib[-1]:.0f} MiB, {growth_mib(report):+.1f} MiB since the first quarter "
        f"(allowed: {allowed})"
    )
    for problem in report.problems[:SHOWN_PROBLEMS]:
        print(f"PROBLEM: {problem}")
    print(f"{len(report.problems)} problems" if report.problems else "nothing unexpected, nothing left behind")
    return int(bool(report.problems))


if __name__ == "__main__":
    stop_on_sigterm()
    try:
        sys.exit(main(parse_options(Options, prog="evaluation/soak.py")))
    except KeyboardInterrupt:
        print("interrupted: the server is stopped, nothing is reported", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
