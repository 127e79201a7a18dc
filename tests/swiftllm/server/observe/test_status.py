"""The status page: its data, and in a real browser what a reader sees of it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.testclient import TestClient

from swiftllm.server import status_page
from swiftllm.server.app import lifespan_of
from swiftllm.server.engine_status import Counts, Health, Snapshot
from swiftllm.server.status_page import COLUMNS, StatusPage, assemble_page, sample
from tests.evaluation.headless_browser import Browser, open_browser
from tests.swiftllm.server.fake_service import FakeService

HOSTILE = "<img src=x onerror=\"window.hacked=1\"></script><script>window.hacked=1</script> & 'name'"
TIMELINE = {
    "iteration": 7, "strategy": "asynchronous-overlap", "num_layers": 2, "duration_ms": 10.0, "predicted_ms": 9.0,
    "gpu_batch_busy_ms": 9.5, "gpu_batch_decodes": 3, "prefill_tokens": 1, "cpu_requests": 4,
    "rows": [
        {
        "title": "GPU batch: linear layers",
        "spans": [[0.0, 4.0, "linear", "A", HOSTILE], [5.0, 5.0, "linear", "", "b"]],
    },
        {"title": HOSTILE, "spans": [
            [-2.0, 3.0, "cpu_attention", "A", "began before"], [9.0, 5.0, "cpu_attention", "B", "ends after"]]},
    ],
}  # fmt: skip


def app_of(page: StatusPage) -> FastAPI:
    app = FastAPI(lifespan=lifespan_of(page.sample_snapshots))
    app.include_router(page.router)
    return app


# -- data -------------------------------------------------------------------------------------------------------------


def test_the_page_holds_all_it_needs_and_may_load_nothing_else() -> None:
    page, policy = assemble_page()
    for kind in ("style", "script"):
        (text,) = re.findall(rf"<{kind}>(.+?)</{kind}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert re.findall(r"https?://[^\"' ]+", page) == ["http://www.w3.org/2000/svg"]  # a namespace, never fetched
    assert "innerHTML" not in page and "insertAdjacentHTML" not in page


def test_a_sample_is_the_snapshot_by_column() -> None:
    snapshot = Snapshot(waiting=1, running_cpu=2, output_tokens=3, strategy_iterations={"asynchronous-overlap": 4})
    before_s = time.monotonic()
    row = dict(zip(COLUMNS, sample(snapshot), strict=True))
    assert before_s - 0.001 <= row.pop("time_s") <= time.monotonic() + 0.001  # rounded to milliseconds
    numbers = {name: number for name, number in row.items() if number}
    assert numbers == {"waiting": 1, "running_cpu": 2, "output_tokens": 3, "asynchronous-overlap": 4}


def test_a_page_is_sent_what_is_new_to_it() -> None:
    service = FakeService()
    service.change(health=Health("stopping", "the server is shutting down"), finished={"stop": 2}, waiting=5,
                   prediction_factors={"gpu_batch": 1.25})  # fmt: skip
    with TestClient(app_of(StatusPage(service, HOSTILE))) as client:  # entering starts the samples
        first = client.get("/status.json").json()
        assert first["model"] == HOSTILE and first["engine"]["system"] == "apex" and first["timeline"] is None
        assert first["now"]["waiting"] == 5 and first["now"]["finished"] == {"stop": 2}
        assert first["now"]["prediction_factors"] == {"gpu_batch": 1.25}
        assert first["now"]["health"] == {"status": "stopping", "reason": "the server is shutting down"}
        assert first["columns"] == list(COLUMNS) and len(first["history"]) == 1
        assert client.get("/status.json", params={"since_s": first["history"][-1][0]}).json()["history"] == []
        service.timeline = TIMELINE
        assert client.get("/status.json").json()["timeline"] == TIMELINE
        assert client.get("/status.json?iteration=6").json()["timeline"] == TIMELINE
        assert client.get("/status.json?iteration=7").json()["timeline"] is None
        answer = client.get("/")
        assert answer.headers["content-security-policy"] == assemble_page()[1]
        assert HOSTILE not in answer.text  # the page is the same for all models


def test_history_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr(status_page, "HISTORY_SAMPLES", 4)
    monkeypatch.setattr(status_page, "SAMPLE_INTERVAL_S", 0.001)
    service = FakeService()
    service.ready.records = False
    with TestClient(app_of(StatusPage(service, "model"))) as client:

        def sampled_s() -> list[float]:
            history = client.get("/status.json").json()["history"]
            assert len(history) <= 4
            return [row[0] for row in history]

        first, *_ = sampled_s()
        end_s = time.monotonic() + 30.0
        while first in (times_s := sampled_s()):
            assert time.monotonic() < end_s
        assert len(times_s) == 4 and times_s == sorted(times_s)
        assert client.get("/status.json").json()["records"] is False


# -- in a browser -----------------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[tuple[str, FakeService, uvicorn.Server]]:
    """A page of a hostile model, its address, and what it shows."""
    service = FakeService()
    app = app_of(StatusPage(service, HOSTILE))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    config = server.config
    config.load()
    listening = config.bind_socket()
    thread = threading.Thread(target=server.run, args=[[listening]])
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/", service, server
    server.should_exit = True
    thread.join(timeout=30)
    listening.close()


@pytest.fixture
def browser(tmp_path) -> Iterator[Browser]:
    with open_browser(tmp_path / "browser") as browser:
        yield browser


def until(browser: Browser, condition: str) -> None:
    """Wait until a JavaScript condition holds, 20 s at most."""
    browser.evaluate(
        f"""new Promise((resolve, reject) => {{
            const end = Date.now() + 20000;
            const look = () => ({condition}) ? resolve(true)
                : Date.now() > end ? reject(new Error(document.body.innerText)) : setTimeout(look, 20);
            look();
        }})"""
    )


def text_of(browser: Browser, selector: str) -> str:
    return browser.evaluate(f"document.querySelector({json.dumps(selector)}).textContent")


def test_the_page_shows_what_happens_and_loads_nothing_else(server, browser) -> None:
    url, service, uvicorn_server = server
    service.change(running_gpu=3, gpu_blocks_used=4, running_cpu=1, cpu_blocks_used=16, uptime_s=65.0)
    browser.open(url)
    until(browser, "byId('running-gpu').textContent === '3 requests'")
    assert text_of(browser, "#running-cpu") == "1 request" and text_of(browser, "#health") == "serving for 1 min"
    assert text_of(browser, "#gpu-blocks") == "4 of 8 blocks in use, 4 MiB"
    assert browser.evaluate("byId('gpu-meter').firstElementChild.style.width") == "50%"
    assert "the CPU's cores run the GPU batch" in text_of(browser, "#facts")
    assert "Nothing has run" in text_of(browser, "#strategy")
    assert "this system computes nothing on the CPU" in text_of(browser, "#cpu-note")
    assert "as in the profile" not in text_of(browser, "#facts")

    service.timeline = TIMELINE
    service.change(
        running_gpu=5, running_cpu=40, waiting=2, output_tokens=1000, iterations=10, duration_s=1.0, predicted_s=0.9,
        strategy_iterations={"asynchronous-overlap": 10}, finished={"deadline": 3}, health=Health("stalled", "why"),
        prediction_factors={"gpu_batch": 1.0, "cpu_attention": 1.75},
    )  # fmt: skip
    until(browser, "byId('waiting').textContent === '2 requests' && document.querySelector('#gantt rect')")
    assert text_of(browser, "#health") == "stalled for 1 min" and text_of(browser, "#running-cpu") == "40 requests"
    assert text_of(browser, "#strategy").startswith("Asynchronous overlap:")
    assert "10 ms, predicted 9 ms" in text_of(browser, "#iteration")
    assert "as in the profile, times 1 for the GPU batch and 1.75 for CPU attention." in text_of(browser, "#facts")
    assert "requests past their deadline" in text_of(browser, "#totals")
    # Four spans and the stripe of a joined CPU batch; all inside the picture, also what began before it or ends after.
    assert browser.evaluate("document.querySelectorAll('#gantt rect').length") == 5
    assert browser.evaluate(
        "[...document.querySelectorAll('#gantt rect')].map((one) => [one.x.baseVal.value, one.width.baseVal.value])"
        ".every(([x, width]) => x >= 0 && x + width <= byId('gantt').clientWidth + 1)"
    )
    assert browser.evaluate("byId('classes').hidden")
    counts = {"latency-sensitive": Counts(1, 5, 0, 900), "best-effort": Counts(1, 0, 40, 1100)}
    service.change(classes=counts)
    until(browser, "!byId('classes').hidden")
    assert browser.evaluate("[...document.querySelectorAll('#class-rows tr')].map((row) => row.innerText)") == [
        "latency-sensitive\t1\t5\t0\t900",
        "best-effort\t1\t0\t40\t1,100",
    ]
    # Rates come from the samples: a thousand tokens between two of them.
    until(browser, "charts[0].legend.textContent.match(/tokens.s [1-9]/)")
    assert "overlap 100%" in browser.evaluate("charts[3].legend.textContent")
    until(browser, "document.querySelectorAll('#charts svg path').length > 8")

    assert text_of(browser, "#model") == HOSTILE and HOSTILE in browser.evaluate("document.title")
    assert HOSTILE in text_of(browser, "#gantt") and browser.evaluate("window.hacked === undefined")
    methods = [event["method"] for event in browser.events]
    assert "Runtime.exceptionThrown" not in methods and "Runtime.consoleAPICalled" not in methods
    assert not [event for event in browser.events if event["method"] == "Log.entryAdded"]
    requests = [event["params"]["request"]["url"] for event in browser.events
                if event["method"] == "Network.requestWillBeSent"]  # fmt: skip
    assert len(requests) >= 3 and all(address.startswith((url, "data:,")) for address in requests)

    uvicorn_server.should_exit = True
    until(browser, "byId('health').textContent === 'no answer'")
