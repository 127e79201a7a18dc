"""Profiling a real (tiny) backend: whatever the pools, a table comes out, is cached, and drives the schedulers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest

from apex.build import build_system
from apex.perf.machine_profile import load_or_measure, make_workbench, profile_identity
from apex.perf.model import ProfileMismatch, touched_experts
from apex.perf.profiler import Workbench
from swiftllm import files
from swiftllm.config import EngineConfig
from swiftllm.core.request import SamplingParams
from swiftllm.kv.block_pool import LayerGroups
from swiftllm.ops import matrices
from swiftllm.runtime.torch_backend import open_torch_backend
from tests.reference.fake_gpu import fake_gpu
from tests.reference.fake_streams import FakeWorker
from tests.reference.tiny_experts import make_tiny_experts
from tests.reference.tiny_model import make_tiny_llama


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"), num_hidden_layers=2)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("APEX_CACHE_DIR", str(tmp_path))
    return tmp_path


def config(model_dir: Path, gpu: int, cpu: int, **options) -> EngineConfig:
    return EngineConfig(
        str(model_dir), device="cpu", dtype="float32", num_gpu_blocks=gpu, num_cpu_blocks=cpu, **options
    )


@pytest.mark.parametrize(("gpu", "cpu"), [(40, 200), (0, 40), (40, 0), (1, 1), (2, 3)])
def test_profile_of_any_pools(model_dir: Path, gpu: int, cpu: int) -> None:
    options = config(model_dir, gpu, cpu, max_num_batched_tokens=33)
    engine = build_system("apex", options)
    engine.add(engine.make_request("a", [5, 6, 7], SamplingParams(max_tokens=5, ignore_eos=True)))
    while engine.has_unfinished():
        engine.step()
    assert engine.stats().output_tokens == 5
    table = load_or_measure(options, engine.backend)
    assert all(seconds > 0 for seconds in table.linear.seconds)
    if cpu >= 40:
        assert all(seconds > 0 for curve in table.cpu_attention.curves for seconds in curve.seconds)
    engine.close()


@pytest.mark.parametrize("longest", [3, 4, 10, 20, 32])
def test_profile_for_requests_shorter_than_the_contexts_that_are_measured(model_dir: Path, longest: int) -> None:
    engine = build_system("apex", config(model_dir, 40, 200, max_model_len=longest))
    engine.add(engine.make_request("a", [5, 6], SamplingParams(max_tokens=1, ignore_eos=True)))
    while engine.has_unfinished():
        engine.step()
    assert engine.stats().output_tokens == 1
    engine.close()


def test_requests_too_short_to_profile_are_refused(model_dir: Path) -> None:
    with pytest.raises(ValueError, match="max_model_len=2 must be at least 3"):
        config(model_dir, 40, 200, max_model_len=2)


def test_no_cache_at_all_is_refused(model_dir: Path) -> None:
    with pytest.raises(ValueError, match="no blocks in either tier"):
        build_system("apex", config(model_dir, 0, 0))


def test_cached_table_is_used_and_foreign_ones_are_refused(model_dir: Path, own_cache: Path) -> None:
    options = config(model_dir, 40, 200)
    backend = open_torch_backend(options)
    table = load_or_measure(options, backend)
    (cached,) = (own_cache / "profiles").glob("*.json")
    written = cached.stat().st_mtime_ns
    assert load_or_measure(options, backend) == table
    assert cached.stat().st_mtime_ns == written
    foreign = own_cache / "foreign.json"
    foreign.write_text(cached.read_text().replace(profile_identity(options, backend)["cpu"], "another machine"))
    with pytest.raises(ProfileMismatch, match="another machine"):
        build_system("apex", options, profile=foreign)


def test_a_table_that_cannot_be_kept_is_used_by_the_process_that_measured_it(model_dir, monkeypatch, caplog) -> None:
    """/dev/null is a cache folder that cannot be made; the warning is told once."""
    monkeypatch.setenv("APEX_CACHE_DIR", "/dev/null")
    files._warn_once.cache_clear()
    options = config(model_dir, 40, 200)
    backend = open_torch_backend(options)
    table = load_or_measure(options, backend)
    assert load_or_measure(options, backend) is table
    assert caplog.text.count("the cache /dev/null/profiles cannot be written to (Not a directory)") == 1
    backend.close()


@pytest.mark.parametrize("seed", range(3))
def test_a_swap_leaves_nothing_for_the_operation_that_is_measured_next(model_dir: Path, seed: int) -> None:
    """The worker writes the blocks to the CPU tier: no device waits for that, but the next chunk of a prompt does."""
    with fake_gpu(seed) as cuda:
        options = config(model_dir, 40, 200, max_num_seqs=1)
        backend = open_torch_backend(options, partial(FakeWorker, cuda))
        bench = make_workbench(options, backend)
        with bench.in_use():
            sample = bench.swap(32)
            for _ in range(10):
                sample()
                assert not any(worker.futures for worker in cuda.workers)


def test_times_of_streamed_stages_leave_out_their_copies() -> None:
    """A stage that is not there is run before it is timed, and one that is there is run once."""
    crossed: list[int] = []

    class FiveLayers:
        num_layers, layer_groups = 5, LayerGroups(4, (None,) * 5)
        num_gpu_blocks = num_cpu_blocks = 8
        block_tables = None
        device = SimpleNamespace(type="cpu")
        model_config = SimpleNamespace(vocab_size=100, linear=None)

        def open_gpu_batch(self, items):
            return items

        def gpu_attention(self, layer, gpu_batch):
            pass

        def run_stage(self, layer, batches):
            crossed.append(layer)

        def holds_weights(self, layer):
            return layer not in (1, 2) or crossed[-1:] == [layer]

    bench = Workbench(FiveLayers(), max_model_len=16)
    with bench.in_use():
        linear = bench.linear(3)
        crossed.clear()
        linear()
        linear()
    assert crossed == [0, 1, 1, 2, 2, 3, 0, 1, 1]


def test_rows_that_are_timed_differ_so_that_experts_would_too(model_dir: Path, monkeypatch) -> None:
    """Equal rows pick equal experts: a model that reads one expert for many rows would look far too fast."""
    options = config(model_dir, 40, 200)
    backend, opened = open_torch_backend(options), []
    for name in ("open_gpu_batch", "open_cpu_batch"):
        make = getattr(type(backend._builder), name)
        monkeypatch.setattr(
            type(backend._builder), name, lambda self, of, make=make: opened.append(make(self, of)) or opened[-1]
        )
    bench = make_workbench(options, backend)
    with bench.in_use():
        for operation in (bench.linear(24), bench.last_stage(24), bench.decodes(8, 16, 5)):
            operation()
    wide = [batch for batch in opened if batch.num_rows >= 8]
    assert len(wide) >= 4
    for batch in wide:  # of 24 draws from some hundred tokens, few are drawn twice
        assert len(set(batch.token_ids.tolist())) > batch.num_rows // 2
    backend.close()


def test_rows_of_a_timed_stage_pick_as_many_experts_as_a_batch_of_decodes(tmp_path: Path, monkeypatch) -> None:
    """Rows of one prompt would attend to the same tokens, and pick three quarters of them."""
    folder, picked = make_tiny_experts(tmp_path / "model", "Qwen3Moe", num_experts=64), []
    choose = matrices.choose_experts

    def noted(logits, per_token: int, normalises: bool):
        ids, likelihoods = choose(logits, per_token, normalises)
        picked.append(len(ids.unique()))
        return ids, likelihoods

    monkeypatch.setattr(matrices, "choose_experts", noted)
    options = config(folder, 40, 200)
    backend = open_torch_backend(options)
    bench = make_workbench(options, backend)
    with bench.in_use():
        time_stage = bench.linear(8)
        picked.clear()
        time_stage()
    assert fmean(picked) > 0.8 * touched_experts(8, 64, 3)
    backend.close()
