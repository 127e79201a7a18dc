"""The status page at `/`: what the engine is doing, for people who have not read the papers.

One self-contained page, assembled once from the files in `page/`: no CDN, no build step. Its content security policy
forbids everything from other hosts. While the page is visible it fetches `/status.json` once a second.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, JSONResponse

from swiftllm.core.plan import Strategy

if TYPE_CHECKING:
    from swiftllm.server.client import EngineClient
    from swiftllm.server.engine_status import Snapshot

PAGE_DIR = Path(__file__).parent / "page"
SAMPLE_INTERVAL_S = 1.0
HISTORY_SAMPLES = 300  # five minutes
LEVELS = ("waiting", "running_gpu", "running_cpu", "gpu_blocks_used", "cpu_blocks_used")
TOTALS = ("output_tokens", "iterations", "gpu_batch_busy_s", "cpu_busy_s", "duration_s", "predicted_s")
STRATEGIES = tuple(strategy.value for strategy in Strategy)
COLUMNS = ("time_s", *LEVELS, *TOTALS, *STRATEGIES)
ENGINE_FACTS = (
    "system", "device", "device_type", "dtype", "num_gpu_blocks", "num_cpu_blocks", "block_size", "kv_bytes_per_block",
    "cpu_kv_dtype", "cpu_kv_bytes_per_block", "cpu_kernel", "cpu_threads",
)  # fmt: skip


class StatusPage:
    """Serves the page and its data. ``model_name`` is shown as it is."""

    def __init__(self, service: EngineClient, model_name: str) -> None:
        self._service = service
        self._model_name = model_name
        self._history: deque[list[float]] = deque(maxlen=HISTORY_SAMPLES)
        self._page, policy = assemble_page()
        self._headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}
        self.router = APIRouter()
        for path, endpoint in (("/", self._html), ("/status.json", self._json)):
            self.router.add_api_route(path, endpoint, methods=["GET", "HEAD"], include_in_schema=False)

    async def sample_snapshots(self) -> None:
        """Take a snapshot a second until it is cancelled, so that a newly opened page shows the last minutes."""
        while True:
            self._history.append(sample(await self._service.snapshot()))
            await asyncio.sleep(SAMPLE_INTERVAL_S)

    async def _html(self) -> HTMLResponse:
        return HTMLResponse(self._page, headers=self._headers)

    async def _json(self, since_s: float = float("-inf"), iteration: int = -1) -> JSONResponse:
        """The current state, samples later than ``since_s``, and the timeline unless it is that of ``iteration``."""
        ready, report = self._service.ready, await self._service.report(wants_timeline=True)
        timeline = report.timeline
        if timeline is not None and timeline["iteration"] == iteration:
            timeline = None
        description = ready.description
        engine = {name: description[name] for name in ENGINE_FACTS if name in description}
        engine["decodes_on_cpu"] = "strategy" in description  # systems without strategies at most store KV cache there
        engine["slo"] = asdict(ready.slo) if ready.slo else None
        answer = {
            "model": self._model_name,
            "engine": engine,
            "now": asdict(report.snapshot) | {"time_s": time.monotonic()},
            "columns": COLUMNS,
            "history": [row for row in list(self._history) if row[0] > since_s],
            "records": ready.records,
            "timeline": timeline,
        }
        return JSONResponse(answer, headers={"Cache-Control": "no-store"})


def sample(snapshot: Snapshot) -> list[float]:
    """The values of :data:`COLUMNS`. The time is the server's, as the engine's clock stops while it is idle."""
    numbers = [getattr(snapshot, name) for name in (*LEVELS, *TOTALS)]
    strategies = [snapshot.strategy_iterations.get(name, 0) for name in STRATEGIES]
    return [round(number, 3) for number in (time.monotonic(), *numbers, *strategies)]


def assemble_page() -> tuple[str, str]:
    """The page with its style and script inlined, and the policy that allows only these two."""
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
