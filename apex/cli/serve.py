"""`apex serve`: an OpenAI-compatible server."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from apex.cli.config_file import ConfigFile
from apex.cli.errors import InputError, input_errors
from apex.cli.flags import EngineFlags, ModelName, ProfileFile, StrategyFlags, SystemName, Unchecked, running_engine
from apex.source_tree import SETUP
from swiftllm.server.service.service import EngineService, ServiceLimits
from swiftllm.server.settings import ServerSettings
from swiftllm.share import Share, take_share

if TYPE_CHECKING:
    from swiftllm.engine.engine import Engine


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
    the engine is doing. Ctrl-C lets running requests finish, then stops. See docs/serving.md.
    """

    model: ModelName
    """A Llama-family model: a Hugging Face folder, or a name on its hub such as meta-llama/Llama-3.1-8B."""
    system: SystemName = "apex"
    """Scheduler: vllm and swiftllm use only the GPU; neo, fastdecode and apex use the CPU as in their papers."""
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
        settings = replace(settings, port=free_port(settings.host, settings.port))
        try:
            from swiftllm.server.run import run_server
        except ModuleNotFoundError as error:
            raise InputError(f"the server needs the package {error.name}: {SETUP}") from error
        with running_engine(self.system, config, strategy, self.profile) as engine:
            from apex.timeline.live import LiveTimeline

            recorder = LiveTimeline(engine)
            service = EngineService(engine, limits)
            service.add_observer(recorder)
            print(start_message(engine, settings, limits, defaults), flush=True)
            run_server(service, settings, recorder)
        return 0


def free_port(host: str, port: int) -> int:
    """The port, or a free one for 0. Checked before the model is loaded, which takes time.

    Raises:
        InputError: another program listens there, or this machine has no such address.
    """
    where = f"--host {host} --port {port}"
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.create_server(address, family=family) as listening:
            return listening.getsockname()[1]
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
    return advice.get(error.errno, error.strerror or str(error))


def start_message(
    engine: Engine, settings: ServerSettings, limits: ServiceLimits, defaults: Mapping[str, float]
) -> str:
    """The text printed at the start: system, model, limits, the model's sampling ``defaults`` and addresses."""
    description, residents = engine.describe(), engine.residents
    longest, at_once = residents.longest_request, residents.limits.max_num_seqs
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    url = f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"
    weights = "" if description["weights"] == description["dtype"] else f", weights: {description['weights']}"
    values = ", ".join(f"{name}={value}" for name, value in defaults.items())
    by_default = f"sampling by default, as generation_config.json says: {values} (--generation-config none: OpenAI's)\n"
    formats = settings.formats(engine.tokenizer)
    calls, reasoning = formats.calls.name if formats.calls else "none", "think" if formats.has_reasoning else "none"
    no_text = "the model folder has no tokenizer: prompts are lists of token ids, and answers have no text\n"
    return (
        f"{description['system']} serves {description['model']} ({description['dtype']}{weights}) "
        f"on {description['device']}\n"
        f"limits: {longest:,} tokens a request, {at_once} requests with KV cache at once, "
        f"{limits.max_queued_requests} running or waiting, {limits.max_queued_best_effort} best-effort ones\n"
        f"{by_default if defaults else ''}"
        f"{no_text if engine.tokenizer is None else ''}"
        f"tool calls: {calls} (--tool-call-parser)    reasoning: {reasoning} (--reasoning-parser)\n"
        f"API: {url}/v1    status page: {url}/    metrics: {url}/metrics    Ctrl-C stops"
    )
