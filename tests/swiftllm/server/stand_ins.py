"""Servers in processes of their own: the real ones, whose engines stand in for a model.

python -m tests.swiftllm.server.stand_ins NAME PORT
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

from swiftllm.server.engine_process import EngineService
from swiftllm.server.messages import ServiceLimits
from swiftllm.server.run import run_server
from swiftllm.server.settings import ServerSettings
from tests.reference.fake_engine import fake_engine
from tests.swiftllm.server.serving import check_empty

EMPTY = "the engine is empty"
STALL_TIMEOUT_S = 0.2


def slow_service() -> EngineService:
    """A step takes 20 ms, and is logged. Says at its end that nothing is left."""
    engine = fake_engine("swiftllm", num_gpu_blocks=64, num_cpu_blocks=0, num_layers=1)
    step, close = engine.step, engine.close

    def slow_step() -> Any:
        time.sleep(0.02)
        logging.getLogger("stand-in").warning("a step")
        return step()

    def close_empty() -> None:
        check_empty(engine)
        close()
        print(EMPTY, file=sys.stderr, flush=True)

    engine.step, engine.close = slow_step, close_empty
    return EngineService(engine, ServiceLimits(stall_timeout_s=STALL_TIMEOUT_S))


def mortal_service() -> EngineService:
    """A slow one that is started again once."""
    service = slow_service()
    service.limits = ServiceLimits(restart_engine=1)
    return service


def broken_once_service() -> EngineService:
    """Fails for good at its sixth step, and is started again."""
    service = failing_service()
    service.limits = ServiceLimits(restart_engine=1)
    return service


def failing_service() -> EngineService:
    """Its sixth step fails, and it cannot recover."""
    service = slow_service()
    engine = service.engine
    step = engine.step

    def failing_step() -> Any:
        if engine.stats().iterations == 5:
            raise RuntimeError("this step fails")
        return step()

    def recover() -> Any:
        raise RuntimeError("a rank has died and cannot be replaced")

    engine.step, engine.recover = failing_step, recover
    return service


if __name__ == "__main__":
    run_server(
        {build.__name__: build for build in (slow_service, failing_service, mortal_service, broken_once_service)}[
            sys.argv[1]
        ],
        ServerSettings(port=int(sys.argv[2])),
    )
