"""`apex serve`, an OpenAI-compatible server, and `apex attention-host`, which lends this machine to an engine."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from apex.cli.options import (
    SYSTEM_HELP,
    ConfigFile,
    EngineFlags,
    ModelName,
    ProfileFile,
    StrategyFlags,
    SystemName,
    Unchecked,
    start_engine,
)
from apex.cli.output import InputError, input_errors
from apex.source_tree import SETUP
from apex.strategy import StrategyConfig
from swiftllm.machine import Share, take_share
from swiftllm.processes import reserved_port
from swiftllm.server.messages import ServiceLimits
from swiftllm.server.settings import ServerSettings
from swiftllm.server.tool_calls import FORMATS

if TYPE_CHECKING:
    from swiftllm.config import EngineConfig
    from swiftllm.server.client import EngineClient
    from swiftllm.server.engine_process import EngineService

# -- apex serve --------------------------------------------------------------------------------------------------------
# `apex serve`: an OpenAI-compatible server.


@dataclass(frozen=True)
class ServerFlags(Unchecked, ServerSettings):
    """Address and access rules of the server."""


@dataclass(frozen=True)
class LimitFlags(Unchecked, ServiceLimits):
    """Limits of the server."""


@dataclass(frozen=True)
class Serve(ConfigFile):
    """Serve a model over HTTP, with OpenAI's API.

    For example:

      apex serve ~/.cache/apex/models/SmolLM2-135M-Instruct
      apex serve MODEL --system vllm --port 8001 --max-model-len 4096
      apex serve MODEL --num-gpu-blocks 500 --num-cpu-blocks 20000
      apex serve --config serve.yaml

    where serve.yaml holds lines such as `model: /models/llama-3.1-8b` and `num-gpu-blocks: 500`. The first start with a
    model measures the machine: SmolLM2 on two cores is ready after about 30 s, later after 7 s. A page at / shows what
    the engine is doing. Ctrl-C lets running requests finish, then stops. See docs/serving/server.md.
    """

    model: ModelName
    """A Hugging Face folder, or a name on its hub such as meta-llama/Llama-3.1-8B."""
    system: Annotated[SystemName, tyro.conf.arg(help=SYSTEM_HELP)] = "apex"
    profile: ProfileFile = None
    """Profile table to use; by default the cached one, measured on the first start."""
    share: str | None = None
    """Use one of several equal parts of this machine, such as 1/4: cores, memory, and GPUs or a part of one; by default
    all of it."""
    server: ServerFlags = field(default_factory=ServerFlags)
    limits: LimitFlags = field(default_factory=LimitFlags)
    engine: EngineFlags = field(default_factory=EngineFlags)
    strategy: StrategyFlags = field(default_factory=StrategyFlags)

    def run(self) -> int:
        if self.share is not None:
            try:
                take_share(Share.parse(self.share))  # before torch is loaded, whose threads inherit the cores
            except (ValueError, OSError) as error:
                raise InputError(str(error)) from None
        with input_errors():
            settings, limits = self.server.checked(), self.limits.checked()
            config, strategy = self.engine.config(self.model), self.strategy.config(self.system)
            defaults = settings.sampling_defaults(config.model)
        try:
            from swiftllm.server.client import EngineNotBuilt
            from swiftllm.server.run import run_server
        except ModuleNotFoundError as error:
            raise InputError(f"the server needs the package {error.name}: {SETUP}") from error

        build = partial(build_service, self.system, config, strategy, self.profile, limits)
        with ExitStack() as stack:  # the port is reserved before the model is loaded, which takes time
            settings = replace(settings, port=reserve(settings.host, settings.port, stack))

            def announce(client: EngineClient) -> None:
                with suppress(OSError):  # a full disk does not keep it from serving
                    print(start_message(client, settings, defaults), flush=True)

            try:
                run_server(build, settings, announce)
            except EngineNotBuilt as error:
                raise InputError(str(error)) from None
        return 0


def build_service(
    system: str, config: EngineConfig, strategy: StrategyConfig, profile: Path | None, limits: ServiceLimits
) -> EngineService:
    """What the engine's process runs.

    Raises:
        ValueError: the engine cannot be built; the message says what to do.
    """
    from apex.timeline.recorder import LiveTimeline
    from swiftllm.server.engine_process import EngineService

    try:
        engine = start_engine(system, config, strategy, profile)
    except InputError as error:
        raise ValueError(str(error)) from None
    return EngineService(engine, limits, LiveTimeline(engine))


def reserve(host: str, port: int, stack: ExitStack) -> int:
    """Reserve the port, or a free one for 0, until ``stack`` ends."""
    where = f"--host {host} --port {port}"
    try:
        return stack.enter_context(reserved_port(host, port))
    except socket.gaierror as error:
        raise InputError(f"{where}: there is no such host ({error.strerror})") from None
    except OSError as error:
        raise InputError(f"{where}: {why_not(error)}") from None


def why_not(error: OSError) -> str:
    """Why an address cannot be listened at, and what to do."""
    advice = {
        errno.EADDRINUSE: "another program listens there: stop it, or give another port (0 takes any free one)",
        errno.EACCES: "ports below 1024 are the system's: give another",
        errno.EADDRNOTAVAIL: "this machine has no such address: 127.0.0.1 is itself, 0.0.0.0 all its interfaces",
    }
    return advice.get(error.errno or 0, error.strerror or str(error))


def start_message(client: EngineClient, settings: ServerSettings, defaults: Mapping[str, float]) -> str:
    """The text printed at the start: system, model, limits, the model's sampling ``defaults`` and addresses."""
    ready, tokenizer = client.ready, client.tokenizer
    description, limits = ready.description, ready.limits
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    url = f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"
    weights = "" if description["weights"] == description["dtype"] else f", weights: {description['weights']}"
    values = ", ".join(f"{name}={value}" for name, value in defaults.items())
    by_default = f"sampling by default, as generation_config.json says: {values} (--generation-config none: OpenAI's)\n"
    formats = settings.formats(tokenizer)
    calls = formats.calls_name or ("not known" if formats.has_unknown_calls else "none")
    reasoning = formats.reasoning_name or "none"
    unknown = (
        "the chat template has calls of tools in a form that is not known: they stay text, and tools are refused "
        f"unless they must be called; --tool-call-parser names a form: {', '.join(FORMATS)}\n"
    )
    no_text = "the model folder has no tokenizer: prompts are lists of token ids, and answers have no text\n"
    return (
        f"{description['system']} serves {description['model']} ({description['dtype']}{weights}) "
        f"on {description['device']}\n"
        f"limits: {ready.request_limits.longest_request:,} tokens a request, "
        f"{ready.max_num_seqs} with KV cache at once, "
        f"{limits.max_queued_requests} running or waiting, {limits.max_queued_best_effort} best-effort ones\n"
        f"{by_default if defaults else ''}"
        f"{no_text if tokenizer is None else ''}"
        f"{unknown if formats.has_unknown_calls else ''}"
        f"tool calls: {calls} (--tool-call-parser)    reasoning: {reasoning} (--reasoning-parser)\n"
        f"API: {url}/v1    status page: {url}/    metrics: {url}/metrics    Ctrl-C stops"
    )


# -- apex attention-host -----------------------------------------------------------------------------------------------
# `apex attention-host`: lends this machine's memory and cores to an engine on another host.


@dataclass(frozen=True)
class AttentionHostCommand(ConfigFile):
    """Hold a part of the CPU tier for an engine on another machine, and compute its CPU attention.

    For example, with the same APEX_HOST_SECRET set on both machines:

      apex attention-host --listen 0.0.0.0:7300                    # on 10.0.0.7
      apex serve MODEL --attention-hosts 10.0.0.7:7300             # on the machine with the GPU

    It needs no GPU and no model. One engine at a time may use it. When the engine ends, its memory is free again for
    the next one. Ctrl-C stops. See docs/features/distributed.md.
    """

    listen: str = "127.0.0.1:7300"
    """Address and port to listen at; port 0 takes any free one. Other machines need a secret to be set."""
    memory_gib: float | None = None
    """Memory for K and V; by default half of what is available when an engine connects."""
    threads: int | None = None
    """Threads of attention; by default all cores."""

    def run(self) -> int:
        with input_errors():
            for name in ("memory_gib", "threads"):
                if (value := getattr(self, name)) is not None and value <= 0:
                    raise ValueError(f"{name}={value} must be more than 0")
            from swiftllm.machine import GIB, available_host_bytes
            from swiftllm.remote.host import AttentionHost
            from swiftllm.remote.protocol import parse_address, shared_secret

            logging.basicConfig(level=logging.INFO, format="%(message)s")
            memory_bytes = None if self.memory_gib is None else int(self.memory_gib * GIB)
            if (memory_bytes or 0) > (available := available_host_bytes()):
                raise ValueError(f"memory_gib={self.memory_gib} exceeds the {available / GIB:.1f} GiB available here")
            address = parse_address(self.listen)
            try:
                host = AttentionHost(address, shared_secret(), memory_bytes=memory_bytes, num_threads=self.threads)
            except OSError as error:
                raise InputError(f"--listen {self.listen}: {why_not(error)}") from None
        address, port = host.address
        print(f"waiting for an engine at {address}:{port} with {host.num_threads} threads; Ctrl-C stops", flush=True)
        host.serve_forever()
        return 0
