"""How CPU attention is fastest: measured at the first start on a machine, then read."""

import json
from contextlib import closing
from pathlib import Path

import pytest
import torch

import pacpu
from swiftllm.build import make_backend
from swiftllm.config import EngineConfig
from swiftllm.files import keep
from swiftllm.runtime import cpu_tuning
from swiftllm.runtime.cpu_tuning import fastest, kept, measure, use_fastest_attention
from tests.reference.tiny_model import make_tiny_llama

KINDS = [(dtype, heads) for dtype in ("float16", "bfloat16", "float32", "int8") for heads in pacpu.HEADS]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A machine that has measured nothing, with next to no cache."""
    monkeypatch.setenv("APEX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cpu_tuning, "MIN_BYTES", 8 << 20)
    monkeypatch.setattr(cpu_tuning, "SAMPLE_BYTES", 4 << 20)
    monkeypatch.setattr(cpu_tuning, "last_level_cache_bytes", lambda: 0)
    monkeypatch.setattr(cpu_tuning, "SETTLED_S", 0)
    monkeypatch.setattr(cpu_tuning, "measure", measure)
    monkeypatch.setattr(cpu_tuning, "keep", keep)
    before = {kind: (pacpu.prefetch(*kind), pacpu.shared_row_cost(*kind)) for kind in KINDS}
    yield
    for kind, (way, cost) in before.items():
        pacpu.set_prefetch(*kind, way)
        pacpu.set_shared_row_cost(*kind, cost)


def the_file(cache: Path) -> Path:
    (path,) = cache.rglob("*.attention")
    return path


def pretend(path: Path, best: str, cost: float = 0.5) -> None:
    """Have the cache say that one way is the fastest in every kind of call, and what a further row costs."""
    kinds = [" ".join(kind) for kind in KINDS]
    rates = {kind: {way: 1.0 for way in pacpu.prefetches(*kind.split())} | {best: 2.0} for kind in kinds}
    measured = {"rates": rates, "shared_row_costs": dict.fromkeys(kinds, cost)}
    path.write_text(json.dumps(json.loads(path.read_text()) | measured))


def ways() -> set[str]:
    return {pacpu.prefetch(*kind) for kind in KINDS}


def costs() -> set[float]:
    return {pacpu.shared_row_cost(*kind) for kind in KINDS}


def test_the_fastest_way_is_measured_once_and_then_read(tmp_path):
    use_fastest_attention()
    rates = kept().rates
    assert set(rates) == {f"{dtype} {heads}" for dtype, heads in KINDS}
    for kind in KINDS:
        by_way = rates[" ".join(kind)]
        assert set(by_way) == set(pacpu.prefetches(*kind)) and min(by_way.values()) > 0
        assert pacpu.prefetch(*kind) == fastest(by_way) and by_way[fastest(by_way)] >= 0.98 * max(by_way.values())
        cost = kept().shared_row_costs[" ".join(kind)]
        assert 1 / 8 <= cost <= 1 and pacpu.shared_row_cost(*kind) == round(cost * 8) / 8
    for way, cost in zip(pacpu.PREFETCHES, (0.26, 0.49, 0.95), strict=True):
        pretend(the_file(tmp_path), way, cost)
        content = the_file(tmp_path).read_text()
        use_fastest_attention()
        assert ways() == {way} and costs() == {round(cost * 8) / 8}
        assert the_file(tmp_path).read_text() == content
    pretend(the_file(tmp_path), "L2 AVX2")
    use_fastest_attention()
    assert pacpu.prefetch("int8", "MHA") == "L2 AVX2" and ways() == {"L1", "L2 AVX2"}
    use_fastest_attention(measure_again=True)
    assert the_file(tmp_path).read_text() != content


def test_an_engine_prefetches_as_the_machine_was_measured(tmp_path):
    use_fastest_attention()
    model = make_tiny_llama(tmp_path / "tiny", num_hidden_layers=2)
    config = EngineConfig(str(model), device="cpu", dtype="float32", num_gpu_blocks=4, num_cpu_blocks=4)
    for way in ("none", "L2"):
        pretend(the_file(tmp_path), way)
        with closing(make_backend(config)):
            assert ways() == {way} and costs() == {0.5}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"rates": 3}', '{"rates": {"float16 MHA": {}}}'])
def test_a_damaged_file_is_measured_again(tmp_path, content):
    use_fastest_attention()
    the_file(tmp_path).write_text(content)
    use_fastest_attention()
    assert set(kept().rates) == {f"{dtype} {heads}" for dtype, heads in KINDS}


def test_short_of_memory_nothing_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_tuning, "available_host_bytes", lambda: 31 << 20)  # four times 8 MiB are wanted
    before = {kind: pacpu.prefetch(*kind) for kind in KINDS}
    use_fastest_attention()
    assert kept() is None and {kind: pacpu.prefetch(*kind) for kind in KINDS} == before


def test_a_cache_that_cannot_be_written_stops_no_engine(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("APEX_CACHE_DIR", str(tmp_path / "file"))
    use_fastest_attention()
    assert "cannot be written to (Not a directory)" in caplog.text


def test_measuring_leaves_the_ways_as_they_were():
    memory = torch.full((8 << 20,), 0x3C, dtype=torch.uint8)
    for way, cost in zip(pacpu.PREFETCHES, (0.25, 0.5, 1.0), strict=True):
        for kind in KINDS:
            pacpu.set_prefetch(*kind, way)
            pacpu.set_shared_row_cost(*kind, cost)
        measure(memory, 1, rounds=1)
        assert ways() == {way} and costs() == {cost}


def test_a_further_row_costs_what_it_adds_to_the_time(monkeypatch):
    """Four rows that share blocks take 1.75 times as long as one: a further row costs a quarter."""
    monkeypatch.setattr(cpu_tuning, "_fastest_s", lambda ways, *_: {way: 1.75 if way == 1 / 8 else 4.0 for way in ways})
    memory = torch.full((8 << 20,), 0x3C, dtype=torch.uint8)
    assert set(measure(memory, 1).shared_row_costs.values()) == {0.25}
