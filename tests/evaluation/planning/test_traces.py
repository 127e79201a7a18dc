"""Published traces are fetched before a measurement, from a server here; what cannot be had is said, and remembered."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers

from apex.simulator.paper_settings import load_setting
from apex.workloads import catalogue
from apex.workloads.catalogue import load_trace
from apex.workloads.files import TraceRow, read_rows, write_rows
from apex.workloads.sources import SOURCES, Source, TextOptions
from evaluation import reproduce_fig5
from evaluation.experiments.papers.jobs import FigureJob, make_job
from evaluation.experiments.papers.options import FigureOptions
from evaluation.planning import traces
from evaluation.planning.traces import fetch_apart, tokenizer_of
from tests.evaluation.papers_machines import A10G, T4, NamedMachine, on_machine

AZURE = b"TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-12 00:00:00+00:00,374,44\n2024-05-12 00:00:02+00:00,879,55\n"
RECORD = {"messages": [{"role": "user", "content": "a b c"}], "reasoning": "d e", "answer": "f"}
PAGES = {"/azure": AZURE, "/dolphin": (json.dumps(RECORD) + "\n").encode() * 3}


@pytest.fixture
def server() -> Iterator[str]:
    """An address with PAGES; /silent never answers, and all else is not found."""
    closing = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/silent":
                closing.wait()
                return
            content = PAGES.get(self.path, b"")
            self.send_response(200 if content else 404)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *words: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{serving.server_port}"
        closing.set()
        serving.shutdown()
        thread.join()


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("APEX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return tmp_path / "cache" / "traces"


@pytest.fixture
def words(tmp_path) -> Path:
    """A model's folder whose tokens are words."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    (tmp_path / "my-model").mkdir()
    tokenizer.save(str(tmp_path / "my-model" / "tokenizer.json"))
    return tmp_path / "my-model"


def source(name: str, **changes: object) -> Source:
    return replace(next(source for source in SOURCES if source.name == name), **changes)


def test_a_trace_is_fetched_by_another_process_and_names_its_tokenizer(server, cache, words):
    text = TextOptions(words, 2, "")
    fetch_apart(source("azure2024-conv", origin=f"{server}/azure", stride=1), text, cache)
    assert read_rows(cache / "azure2024_conv.csv") == (TraceRow(374, 44, 0.0), TraceRow(879, 55, 2.0))
    assert load_trace("azure-conv").origin.note.endswith("(Azure/AzurePublicDataset, CC-BY-4.0)"), "its own tokens"
    fetch_apart(source("dolphin-r1", origin=f"{server}/dolphin"), text, cache)
    assert read_rows(cache / "dolphin_r1.csv") == (TraceRow(3, 3),) * 2
    origin = load_trace("dolphin-r1").origin
    assert origin.kind == "measured" and origin.note.endswith("; tokens counted by tokenizer of my-model")


def test_an_address_that_fails_or_is_silent_is_given_up(server, cache, words):
    text = TextOptions(words, 2, "")
    with pytest.raises(ConnectionError, match=r"^HTTP Error 404: Not Found\n"):
        fetch_apart(source("dolphin-r1", origin=f"{server}/gone"), text, cache)
    with pytest.raises(TimeoutError, match=r"longer than 0\.5 s"):
        fetch_apart(source("dolphin-r1", origin=f"{server}/silent"), text, cache, limit_s=0.5)
    assert not list(cache.rglob("*.csv"))


def fig5_on(monkeypatch, tmp_path, card, fetch, **options) -> tuple[FigureJob, str]:
    """Figure 5 on a machine with such a card and fetcher, and what was printed."""
    on_machine(monkeypatch, tmp_path / "cache", card)
    monkeypatch.setattr(traces, "fetch_apart", fetch)
    console = Console(file=io.StringIO(), width=400)
    machine = NamedMachine("apex-t4" if card is T4 else "apex-a10")
    chosen = FigureOptions(jobs=1, systems=("swiftllm",), **options)
    catalogue_lengths_forgotten()
    return make_job(reproduce_fig5.FIGURE, chosen, console, machine), console.file.getvalue()


def catalogue_lengths_forgotten() -> None:
    """Lengths are kept for the life of a process; here machines change."""
    from evaluation.experiments import places

    places._lengths.cache_clear()


def kinds(job: FigureJob) -> dict[str, str]:
    """Origins of the lengths by workload, of measured and simulated points together, of those that are measured."""
    planned = [job.measured._point(place) for place in job.measured.grid.places()]
    measured = {point.task.lengths.spec.name for point in planned}
    points = [point for point in (*job.points, *planned) if point.task.lengths.spec.name in measured]
    found = {(point.task.lengths.spec.name, point.task.lengths.origin.kind) for point in points}
    assert len(found) == len(measured), "measured and simulated points replay the same trace"
    return dict(found)


def test_a_measured_figure_replays_fetched_traces_and_says_which_it_lacks(monkeypatch, tmp_path):
    asked = []

    def fetch(source: Source, text: TextOptions, folder: Path) -> Path:
        asked.append(source.name)
        if source.name == "livebench":
            raise OSError("no route to host")
        write_rows(folder / source.file, [TraceRow(200, 40)] * 4, {"tokens_counted_by": text.counted_by})
        return folder / source.file

    job, printed = fig5_on(monkeypatch, tmp_path, A10G, fetch)
    assert asked == ["azure2024-conv", "livebench", "dolphin-r1"], "those of this machine's panels, in their order"
    assert kinds(job) == {"azure-conv": "measured", "livebench": "fitted", "dolphin-r1": "measured"}
    assert "fetching azure2024-conv (CC-BY-4.0, 1.1 GB) from https://" in printed
    assert "not fetched: livebench: OSError: no route to host" in printed
    assert "livebench is drawn from quantile tables, and its rows say so (trace_origin). To fetch it: " in printed
    assert "scripts/download_traces.py livebench" in printed
    again, printed = fig5_on(monkeypatch, tmp_path, A10G, fetch)
    assert len(asked) == 3, "neither what is there nor what failed is fetched again"
    assert "not fetched: livebench: it failed before: OSError: no route to host" in printed
    assert kinds(again) == kinds(job)


def test_another_source_of_the_same_workload_is_tried(monkeypatch, tmp_path):
    asked = []

    def fetch(source: Source, text: TextOptions, folder: Path) -> Path:
        asked.append(source.name)
        raise RuntimeError("gone")

    job, printed = fig5_on(monkeypatch, tmp_path, T4, fetch)
    assert asked == ["osc-neo-llama2", "osc"] and kinds(job) == {"osc": "fitted"}
    assert printed.count("not fetched") == 2 and printed.count("drawn from quantile tables") == 1


@pytest.mark.parametrize(
    ("card", "options"),
    [(None, {}), (T4, {"rehearse": True}), (T4, {"backend": "simulated"}), (T4, {"setting": "small"})],
    ids=["no card", "rehearsal", "simulation", "small"],
)
def test_nothing_else_asks_the_network(monkeypatch, tmp_path, card, options):
    asked = []
    monkeypatch.setattr("evaluation.experiments.papers.jobs.small_points", lambda *_: ([], {}))
    fig5_on(monkeypatch, tmp_path, card, lambda source, *_: asked.append(source), **options)
    assert asked == []


def test_texts_are_counted_by_the_measured_model_where_its_tokenizer_is_there(monkeypatch, cache, words):
    paper = load_setting("apex-a10")
    monkeypatch.setattr(traces, "try_to_load_from_cache", lambda name, file: None)
    assert tokenizer_of(paper, FigureOptions()).name == "SmolLM2-135M-Instruct"
    assert tokenizer_of(paper, FigureOptions(model=words)) == words
    snapshot = words.parent / "models--meta-llama--Llama-3.1-8B" / "snapshots" / "1234"
    monkeypatch.setattr(traces, "try_to_load_from_cache", lambda name, file: str(snapshot / file))
    assert tokenizer_of(paper, FigureOptions()) == snapshot
    assert TextOptions(snapshot, 1, "").counted_by == "tokenizer of meta-llama/Llama-3.1-8B"
    assert catalogue._counted(cache / "osc.csv") == ""
