"""A Ray Serve application: replicas of the server, which Ray places, scales and replaces.

serve run swiftllm.server.ray_serve:application model=meta-llama/Llama-3.1-8B system=apex num_replicas=2
gpus_per_replica=1
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from swiftllm.config import EngineConfig
from swiftllm.model.folder import model_folder
from swiftllm.server.settings import ServerSettings

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from swiftllm.server.engine_process import EngineService

try:
    from ray import serve
except ImportError as error:
    raise ValueError(
        f"Ray Serve needs the package {error.name}: type `pip install 'apex-llm-serving[ray-serve]'`"
    ) from error

MAX_ONGOING_REQUESTS = 4096
"""Requests that Serve passes to a replica at once; the engine has a queue of its own, and refuses by name."""


def application(arguments: Mapping[str, Any]) -> serve.Application:
    """The application for ``serve run`` or :func:`ray.serve.run`.

    Args:
        arguments: ``model``, and any field of :class:`~swiftllm.config.EngineConfig`. ``system`` (default apex) is the
            scheduler. ``num_replicas`` (1), ``gpus_per_replica`` (0) and ``cpus_per_replica`` (1) are for Ray.

    Raises:
        ValueError: an argument is unknown or invalid; the message says which.
    """
    fields = dict(arguments)
    num_replicas = int(fields.pop("num_replicas", 1))
    resources = {
        "num_gpus": float(fields.pop("gpus_per_replica", 0)),
        "num_cpus": float(fields.pop("cpus_per_replica", 1)),
    }
    system = str(fields.pop("system", "apex"))
    if unknown := sorted(fields.keys() - EngineConfig.__dataclass_fields__.keys()):
        raise ValueError(f"unknown arguments {', '.join(unknown)}: give fields of EngineConfig, such as num_cpu_blocks")
    config = TypeAdapter(EngineConfig).validate_python(fields)

    def build_app() -> ASGIApp:  # runs in the replica
        return start_engine(system, config)

    deployment = serve.deployment(
        serve.ingress(build_app)(),
        name="apex",
        num_replicas=num_replicas,
        ray_actor_options=resources,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
    )
    return deployment.bind()


def start_engine(system: str, config: EngineConfig) -> ASGIApp:
    """Build an engine in a process beside this one, and return its HTTP application."""
    # Ray sets OMP_NUM_THREADS=1 for actors without cores of their own; attention has threads of its own.
    os.environ.pop("OMP_NUM_THREADS", None)
    from swiftllm.server.app import create_app
    from swiftllm.server.engine_process import EngineProcess

    return create_app(EngineProcess(partial(build_service, system, config)).connect(), ServerSettings())


def build_service(system: str, config: EngineConfig) -> EngineService:
    """What the engine's process runs."""
    from swiftllm.build import build_engine
    from swiftllm.server.engine_process import EngineService

    return EngineService(build_engine(system, replace(config, model=str(model_folder(config.model)))))
