"""The status page at `/`: what the engine does, as it does it, for people who have not read the papers.

One self-contained page, put together once from the files in `page/`: no CDN, no build step, nothing from other hosts,
which its content security policy holds it to. It asks for `/status.json` once a second while it is looked at.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, JSONResponse

from swiftllm.core.plan import Strategy
from swiftllm.server.observe.background import lifespan_of

if TYPE_CHECKING:
    from swiftllm.server.service.service import EngineService
    from swiftllm.server.service.snapshot import Snapshot

PAGE_DIR = Path(__file__).parent / "page"
SAMPLE_INTERVAL_S = 1.0
HISTORY_SAMPLES = 300  # five minutes
LEVELS = ("waiting", "running_gpu", "running_cpu", "gpu_blocks_used", "cpu_blocks_used")
TOTALS = ("output_tokens", "iterations", "lane_busy_s", "cpu_busy_s", "duration_s", "predicted_s")
STRATEGIES = tuple(strategy.value for strategy in Strategy)
COLUMNS = ("time_s", *LEVELS, *TOTALS, *STRATEGIES)
ENGINE_FACTS = (
    "system", "device", "device_type", "dtype", "num_gpu_blocks", "num_cpu_blocks", "block_size", "kv_bytes_per_block",
    "cpu_kernel", "cpu_threads",
)  # fmt: skip


class IterationRecorder(Protocol):
    """Records single iterations of the engine. Another package's: here nothing knows how."""

    def latest(self) -> Mapping[str, Any] | None:
        """The last iteration recorded, as the page draws it; asking orders the next one. Never blocks, any thread."""


class StatusPage:
    """Serves the page and what it shows. ``model_name`` is shown as it is; ``recorder`` gives it the timeline.

    While the server runs, a task takes a snapshot a second, so that a page just opened has the last minutes to show.
    """

    def __init__(self, service: EngineService, model_name: str, recorder: IterationRecorder | None = None) -> None:
        self._service = service
        self._model_name = model_name
        self._recorder = recorder
        self._history: deque[list[float]] = deque(maxlen=HISTORY_SAMPLES)
        self._page, policy = assemble_page()
        self._headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}
        self.router = APIRouter(lifespan=lifespan_of(self._sample))
        for path, endpoint in (("/", self._html), ("/status.json", self._json)):
            self.router.add_api_route(path, endpoint, methods=["GET", "HEAD"], include_in_schema=False)

    async def _sample(self) -> None:
        while True:
            self._history.append(sample(self._service.snapshot()))
            await asyncio.sleep(SAMPLE_INTERVAL_S)

    async def _html(self) -> HTMLResponse:
        return HTMLResponse(self._page, headers=self._headers)

    async def _json(self, since_s: float = float("-inf"), iteration: int = -1) -> JSONResponse:
        """Everything of now, samples later than ``since_s``, and the timeline unless it is that of ``iteration``."""
        timeline = self._recorder.latest() if self._recorder else None
        if timeline is not None and timeline["iteration"] == iteration:
            timeline = None
        told = self._service.engine.describe()
        engine = {name: told[name] for name in ENGINE_FACTS if name in told}
        engine["decodes_on_cpu"] = "strategy" in told  # systems without one store there at most
        answer = {
            "model": self._model_name,
            "engine": engine,
            "now": asdict(self._service.snapshot()) | {"time_s": time.monotonic()},
            "columns": COLUMNS,
            "history": [row for row in list(self._history) if row[0] > since_s],
            "records": self._recorder is not None,
            "timeline": timeline,
        }
        return JSONResponse(answer, headers={"Cache-Control": "no-store"})


def sample(snapshot: Snapshot) -> list[float]:
    """The :data:`COLUMNS` of this moment. Its time is the server's: the engine's clock stands while nothing runs."""
    numbers = [getattr(snapshot, name) for name in (*LEVELS, *TOTALS)]
    strategies = [snapshot.strategy_iterations.get(name, 0) for name in STRATEGIES]
    return [round(number, 3) for number in (time.monotonic(), *numbers, *strategies)]


def assemble_page() -> tuple[str, str]:
    """The page with its style and script inside, and the policy that allows these two and nothing else."""
    page = (PAGE_DIR / "status.html").read_text()
    digests = {}
    for kind, names in (("style", ["status.css"]), ("script", ["charts.js", "status.js"])):
        text = "".join((PAGE_DIR / name).read_text() for name in names)
        digests[kind] = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        page = page.replace(f"<{kind}></{kind}>", f"<{kind}>{text}</{kind}>")
    policy = (
        f"default-src 'none'; style-src 'sha256-{digests['style']}'; script-src 'sha256-{digests['script']}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page, policy
