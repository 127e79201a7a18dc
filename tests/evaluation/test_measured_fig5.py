"""Figure 5 in the papers' settings from its command to its files, without a GPU: on a CUDA made of Python, as a
rehearsal, beside a server that dies, and with two layers of the papers' models.

The last takes minutes, and runs where APEX_SLOW_TESTS is set.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from apex.simulator.paper_settings import load_setting
from evaluation import reproduce_fig5
from evaluation.drivers import build_engine
from evaluation.measure.live_systems import EngineHere, LiveSystems
from evaluation.measure.processes import session_stats
from evaluation.results.paths import REPO_ROOT
from evaluation.studies import figures as figure_jobs
from evaluation.studies.papers import FigureOptions
from swiftllm.config import EngineConfig
from swiftllm.engine.engine import Engine
from swiftllm.runtime.torch_backend import TorchBackend
from tests.evaluation.papers_machines import T4, on_machine, simulated_profile
from tests.reference.fake_gpu import fake_gpu
from tests.reference.tiny_model import make_tiny_llama

SLOW = pytest.mark.skipif(not os.environ.get("APEX_SLOW_TESTS"), reason="APEX_SLOW_TESTS is not set: takes minutes")
SYSTEMS = ("swiftllm", "neo", "apex")
OF_A_SETTING = {
    "setting", "setting_title", "setting_origin", "gpu", "weights", "backend", "server",
    "predicted_output_tokens_per_s", "predicted_wall_s", "num_clipped", "max_model_len", "cpu_kv_gb", "max_gpu_blocks",
    "num_gpu_blocks", "num_cpu_blocks",
}  # fmt: skip


def with_profiles(patch: pytest.MonkeyPatch) -> None:
    """Instead of measuring, this machine is said to be as fast as the papers' with a T4."""
    profile = simulated_profile(load_setting("apex-t4"))

    def load(config, backend, path=None):
        return profile(config).table

    patch.setattr("apex.systems.load_or_measure", load)  # first: it is loaded here, with the function of that time
    patch.setattr("apex.perf.profile_cache.load_or_measure", load)


@dataclass(frozen=True)
class Run:
    """A finished command: exit status, what it printed, its result folder and rows."""

    status: int
    printed: str
    folder: Path
    rows: list[dict]


def run_fig5(options: FigureOptions) -> Run:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = reproduce_fig5.main(options)
    folder = (options.results_dir / "fig5" / "latest").resolve()
    return Run(status, printed.getvalue(), folder, json.loads((folder / "summary.json").read_text()))


class OnCard:
    """A backend on the fake GPU as one on a card: torch calls the fake's device "meta"."""

    device = torch.device("cuda")

    def __init__(self, backend: TorchBackend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


class OnFakeCard(LiveSystems):
    """Engines in this process, on the fake GPU."""

    def __init__(self, logs: Path, console: Console) -> None:
        super().__init__(logs, console, lambda: EngineHere(self.build))

    def build(self, system: str, config: EngineConfig) -> Engine:
        assert config.device == "cuda"
        engine = build_engine(system, config)
        engine.backend = OnCard(engine.backend)
        return engine


@pytest.fixture(scope="module")
def on_fake_card(tmp_path_factory) -> Run:
    """Figure 5's panel of the T4 with a tiny checkpoint."""
    folder = tmp_path_factory.mktemp("fake-card")
    options = FigureOptions(
        backend="torch",
        model=make_tiny_llama(folder / "model", max_position_embeddings=64),
        workloads=("osc",),
        systems=SYSTEMS,
        output_lens=(60.0,),
        scale=0.1,
        num_requests=4,
        num_gpu_blocks=8,
        max_num_batched_tokens=64,
        results_dir=folder / "results",
        jobs=1,
    )
    with pytest.MonkeyPatch.context() as patch:
        on_machine(patch, folder / "cache", T4, host_gib=3.76)  # 10 MiB beside what is left for all else
        with_profiles(patch)
        patch.setattr(figure_jobs, "LiveSystems", OnFakeCard)
        patch.setattr("swiftllm.runtime.torch_backend.device_name", lambda device: T4.name)
        with fake_gpu(5) as cuda:
            run = run_fig5(options)
        assert cuda.attended, "no decode attention on the GPU"
    return run


@pytest.fixture
def rehearsing(monkeypatch, tmp_path) -> FigureOptions:
    """Rehearsals on a machine without a card, with engines in this process."""
    on_machine(monkeypatch, tmp_path / "cache", None, host_gib=4.0)
    with_profiles(monkeypatch)
    monkeypatch.setattr(figure_jobs, "LiveSystems", partial(LiveSystems, make_engine=EngineHere))
    return FigureOptions(
        backend="torch",
        rehearse=True,
        workloads=("osc",),
        systems=SYSTEMS,
        output_lens=(50.0,),
        num_requests=4,
        jobs=1,
        results_dir=tmp_path / "results",
    )


def test_the_measured_path_runs_to_its_figure_on_a_fake_card(on_fake_card):
    run = on_fake_card
    assert run.status == 0, run.printed
    assert [row["system"] for row in run.rows] == list(SYSTEMS)
    for row in run.rows:
        assert set(row) >= OF_A_SETTING
        assert (row["backend"], row["gpu"], row["setting"]) == ("torch-cuda", "Tesla T4", "apex-t4")
        assert (row["setting_title"], row["setting_origin"], row["server"]) == ("T4 + Llama-2-7B", "chosen", None)
        assert (row["weights"], row["papers_model"], row["num_gpu_blocks"]) == ("checkpoint", False, 8)
        assert row["completed"] == 4 and row["failed"] == 0 and row["output_tokens_per_s"] > 0
        assert row["predicted_output_tokens_per_s"] > 0 and row["predicted_wall_s"] > 0
    assert (run.folder / "figure.png").stat().st_size > 20_000 and (run.folder / "figure.pdf").is_file()
    assert "MEASURED" in run.printed and "Tesla T4" in run.printed and "SIMULATED tok/s" in run.printed


def test_a_rehearsal_has_every_field_of_a_measurement(on_fake_card, rehearsing):
    run = run_fig5(rehearsing)
    assert run.status == 0, run.printed
    assert [row["system"] for row in run.rows] == list(SYSTEMS)
    for row, measured in zip(run.rows, on_fake_card.rows, strict=True):
        assert set(row) == set(measured)
        assert (row["backend"], row["gpu"], row["weights"]) == ("torch-cpu", None, "dummy")
        assert row["setting"] == "apex-t4" and row["setting_title"].startswith("T4 rehearsal")
        assert row["predicted_output_tokens_per_s"] > 0 and row["failed"] == 0 and row["papers_model"] is False
        filled = {name for name, value in measured.items() if value is not None} - {"gpu"}
        assert {name for name in filled if row[name] is None} == set()
    assert "a tiny random model" in run.printed


DYING_SERVER = """#!{python}
import os, pathlib, sys
sys.path.insert(0, {root!r})
from tests.evaluation.fake_server import FakeServer, token_by_token

starts = pathlib.Path({starts!r})
with starts.open("a") as file:
    print(os.getpid(), *sys.argv[1:], file=file)
is_first = len(starts.read_text().splitlines()) == 1

def behave(exchange, body, index):
    if is_first and index > 36:  # after the warm-up
        print("EngineDeadError: no luck today", flush=True)
        os._exit(3)
    token_by_token(exchange, body, index)

FakeServer(behave, port=int(sys.argv[sys.argv.index("--port") + 1])).serve_forever()
"""


def test_a_server_that_dies_is_a_failed_point_and_starts_again_for_the_next(rehearsing, tmp_path, monkeypatch):
    program, starts = tmp_path / "vllm", tmp_path / "starts"
    program.write_text(DYING_SERVER.format(python=sys.executable, root=str(REPO_ROOT), starts=str(starts)))
    program.chmod(0o755)
    monkeypatch.setattr("evaluation.measure.vllm.vllm_program", lambda device: program)
    options = replace(rehearsing, systems=("vllm", "swiftllm"), output_lens=(50.0, 100.0))
    first = run_fig5(options)
    assert first.status == 1
    assert [(row["system"], row["output_len"]) for row in first.rows] == [
        ("swiftllm", 5.0), ("vllm", 10.0), ("swiftllm", 10.0)
    ]  # fmt: skip
    assert "ServerEnded: vllm: it ended with status 3 while it was measured" in first.printed
    (told,) = (first.folder / "errors").iterdir()
    assert "no luck today" in told.read_text() and (first.folder / "figure.png").is_file()
    begun = [line.split() for line in starts.read_text().splitlines()]
    assert len(begun) == 2 and all("serve" in words and "--load-format" in words for words in begun)
    assert all(session_stats(int(words[0])) == {} for words in begun), "a server outlived the run"

    again = run_fig5(options)
    assert again.status == 0 and again.folder == first.folder and len(again.rows) == 4
    assert len(starts.read_text().splitlines()) == 3, "only the failed point runs again"
    served, in_process = again.rows[:2]
    assert served["failed"] == 0 and served["completed"] == 4
    assert (served["system"], served["backend"], served["server"]) == ("vllm", "server", "vllm 9.9")
    assert served["max_model_len"] == in_process["max_model_len"] and served["num_cpu_blocks"] == 0
    assert set(in_process) - set(served) == {"iterations", "preemptions", "swapped_blocks"}, "what no server tells"
    assert set(served) >= OF_A_SETTING
    assert served["predicted_output_tokens_per_s"] > 0


@SLOW
@pytest.mark.parametrize(
    ("setting", "workload", "max_tokens", "shape"),
    [("apex-t4", "osc", 64, "Llama-2-7B"), ("apex-a10", "azure-conv", 256, "Llama-3.1-8B")],
)
def test_two_layers_of_the_papers_models_run_under_each_system(
    setting, workload, max_tokens, shape, tmp_path, monkeypatch
):
    monkeypatch.setenv("APEX_CACHE_DIR", str(tmp_path / "cache"))
    run = run_fig5(
        FigureOptions(
            backend="torch",
            setting=setting,
            num_layers=2,
            num_requests=3,
            scale=0.1,
            workloads=(workload,),
            output_lens=(50.0,),
            systems=SYSTEMS,
            max_num_batched_tokens=max_tokens,
            results_dir=tmp_path / "results",
        )
    )
    assert run.status == 0, run.printed
    assert [row["system"] for row in run.rows] == list(SYSTEMS)
    for row in run.rows:
        assert (row["backend"], row["dtype"], row["weights"]) == ("torch-cpu", "float16", "dummy")
        assert row["setting"] == setting and shape in row["setting_title"] and row["papers_model"] is False
        assert row["completed"] == 3 and row["failed"] == 0
        assert row["predicted_output_tokens_per_s"] == pytest.approx(row["output_tokens_per_s"], rel=3.0)
