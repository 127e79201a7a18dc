"""The benchmark of the CPU attention kernels: what it counts, what it concludes, and one tiny run."""

import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pacpu
from benchmarks import bench_batches, bench_pacpu, pacpu_cases, pacpu_shared
from benchmarks.pacpu_cases import Case, Memory, Shape, prepare_vllm, usable_isas
from benchmarks.pacpu_report import draw_kernels, markdown_rows, median_cells, print_ratios, verdicts
from evaluation.report import Section
from evaluation.results.claims import load_claims, overview
from swiftllm.runtime import attention_choices

KINDS = [f"{dtype} {heads}" for dtype in attention_choices.DTYPES for heads in pacpu.HEADS]
RATES = {kind: dict.fromkeys(pacpu.prefetches(*kind.split()), 1.0) for kind in KINDS}
COSTS = {kind: 1 / 4 if kind.endswith("MHA") else 0.99 for kind in KINDS}


@pytest.fixture(autouse=True)
def one_torch_thread_afterwards():
    """The benchmark sets torch's threads; a forked child of a process with several would hang in OpenMP."""
    yield
    torch.set_num_threads(1)


def row(**changes: Any) -> dict[str, Any]:
    values = {
        "kernel": "native", "isa": "avx512", "dtype": "float16", "heads": 32, "kv_heads": 8, "batch": 8,
        "context": 1024, "ragged": False, "threads": 1, "gbps": 12.0, "read_gbps": 16.0, "fraction_of_read": 0.75,
        "ratio_to_ispc": 2.0, "ratio_to_vllm": None, "ratio_to_float16": None, "rounds": 3,
    }  # fmt: skip
    return values | changes


def test_shapes_and_bytes():
    assert Shape(3, 512).seq_lens() == [512] * 3
    ragged = Shape(16, 1024, ragged=True).seq_lens()
    assert (min(ragged), max(ragged)) == (1, 2048) and sum(ragged) == pytest.approx(16 * 1024, rel=0.01)
    assert ragged != sorted(ragged)
    # 8 KV heads of K and V, 128 dimensions of 2 bytes.
    case = Case("GQA", "float16", Shape(2, 20), 1)
    assert case.num_bytes == 2 * 20 * 8 * 2 * 128 * 2
    assert case.bytes_held == 2 * 32 * 8 * 2 * 128 * 2
    assert Case("MHA", "float16", Shape(2, 20), 1).num_bytes == 4 * case.num_bytes
    assert Case("GQA", "int8", Shape(2, 20), 1).num_bytes == 2 * 20 * 8 * 264


def test_shared_blocks_count_once():
    shape = Shape(3, 70, shared=50)
    assert str(shape) == "3x70 (50 shared)" and shape.seq_lens() == [70] * 3
    case = Case("GQA", "float16", shape, 1)
    assert case.num_bytes == (48 + 3 * 22) * case.bytes_per_token  # three full blocks
    assert case.bytes_held == (3 + 3 * 2) * 16 * case.bytes_per_token
    _, tables = Memory(2 * case.bytes_held).paged(case, 9, 16)
    assert len(tables) == 2 and torch.stack(tables).unique().numel() == 2 * 9
    for table in tables:
        assert (table[:, :3] == table[0, :3]).all() and table[:, 3:].unique().numel() == 6


def test_verdicts_are_medians_of_one_thread_against_the_requirements():
    rows = [row(fraction_of_read=share) for share in (0.1, 0.63, 0.64)] + [row(threads=2, fraction_of_read=0.0)]
    by_name = {line.split(":")[0]: line for line in verdicts(rows)}
    assert ": met, 63% of the read limit" in by_name["float16 GQA (AVX-512)"]
    assert "skipped, no native with amx" in by_name["bfloat16 GQA (AMX)"]
    missed = [row(fraction_of_read=0.61), row(kernel="llamafile", ratio_to_ispc=1.19, fraction_of_read=0.9)]
    by_name = {line.split(":")[0]: line for line in verdicts(missed)}
    assert ": MISSED, 61%" in by_name["float16 GQA (AVX-512)"]
    assert ": MISSED, 1.19x ispc" in by_name["llamafile, float16 GQA"]
    slow = next(iter(verdicts([row(ratio_to_ispc=1.7)])))
    assert "MISSED" in slow and "75%" in slow and "1.70x" in slow
    without_ispc = next(iter(verdicts([row(ratio_to_ispc=None)])))
    assert ": met" in without_ispc and "ratio to ispc skipped" in without_ispc


def test_medians_over_shapes():
    (line,) = median_cells([row(gbps=speed, batch=speed, ratio_to_ispc=None) for speed in (1.0, 5.0, 2.0)])
    assert line == ("GQA 32/8", "float16", "1", "native", "avx512", "2.0", "16.0", "75%", "-")


def test_ratios_are_medians_over_shapes(capsys):
    ratios = [row(dtype="int8", ratio_to_float16=x, ratio_to_vllm=2 * x) for x in (1.9, 1.7, 2.0)]
    print_ratios([*ratios, row(ratio_to_vllm=3.0), row(kernel="vLLM", ratio_to_vllm=1.0)])
    assert capsys.readouterr().out.splitlines() == [
        "int8 to float16, GQA 32/8, avx512, 1 threads: 1.90x tokens/s (1.70x in the worst shape)",
        "int8 to vLLM's fp8, GQA 32/8, avx512, 1 threads: 3.80x tokens/s (3.40x in the worst shape)",
        "float16 to vLLM, GQA 32/8, avx512, 1 threads: 3.00x tokens/s (3.00x in the worst shape)",
    ]


@pytest.mark.parametrize(("dtype", "kv_dtype", "query"), [("int8", "fp8", "bfloat16"), ("float16", "auto", "float16")])
def test_vllm_gets_its_own_format(monkeypatch, dtype, kv_dtype, query):
    """The cache holds bytes of fp8 in a case of int8; float16 has no AMX kernel."""
    calls = []
    operations = SimpleNamespace(
        get_scheduler_metadata=lambda *arguments: arguments[-1],
        cpu_attention_with_kv_cache=lambda *arguments: calls.append(arguments),
    )
    monkeypatch.setattr(torch.ops, "_C", operations, raising=False)
    case = Case("GQA", dtype, Shape(2, 40), 1)
    memory = Memory(8 * case.bytes_held * (2 if dtype == "int8" else 1))
    prepare_vllm("vec", case, memory, 2)(0)
    ((q, keys, values, out, *_),) = calls
    assert q.dtype == out.dtype == getattr(torch, query) and calls[0][-1] == calls[0][12] == kv_dtype
    for part in (keys, values):
        assert part.shape[1:] == (8, 32, 128) and part.dtype == (torch.uint8 if dtype == "int8" else torch.float16)
    assert (prepare_vllm("amx", case, memory, 2) is None) == (dtype == "float16")


def test_figure_shows_every_contender_once():
    rows = [
        row(kernel=kernel, isa=isa, threads=threads, batch=batch)
        for kernel, isa in (("native", "avx512"), ("native", "avx2"), ("torch SDPA", "contiguous"))
        for threads in (1, 2)
        for batch in (1, 8)
    ]
    drawing = draw_kernels([*rows, row(fraction_of_read=1.3)], "a machine, 2026-01-01")
    assert len(drawing.axes) == 2
    assert all(len(ax.lines) == 4 for ax in drawing.axes)  # three contenders and the limit
    assert len(drawing.legends[0].get_texts()) == 3
    assert drawing.axes[0].get_ylim()[1] > 130  # nothing is cut off
    words = " ".join(text.get_text() for text in drawing.texts)
    assert "a machine, 2026-01-01; head dimension 128" in words and "torch SDPA: " in words and "vLLM" not in words
    drawing.draw_without_rendering()
    boxes = [item.get_window_extent() for item in (*drawing.texts, *drawing.legends)]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    assert markdown_rows(rows).count("\n") == len(rows) + 2


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    monkeypatch.setenv("APEX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(attention_choices, "MIN_BYTES", 8 << 20)
    monkeypatch.setattr(attention_choices, "SAMPLE_BYTES", 4 << 20)
    monkeypatch.setattr(attention_choices, "last_level_cache_bytes", lambda: 0)
    monkeypatch.setattr(attention_choices, "SETTLED_S", 0)
    monkeypatch.setattr(bench_pacpu, "QUICK_SHAPES", (Shape(2, 40), Shape(3, 20, ragged=True)))
    monkeypatch.setattr(bench_pacpu, "MIN_ROTATION_BYTES", 4 << 20)
    monkeypatch.setattr(bench_pacpu, "MIN_TIMED_BYTES", 1 << 20)
    monkeypatch.setattr(bench_pacpu, "MAX_ROUNDS", 1)  # medians of ratios are then ratios of medians
    monkeypatch.setattr(bench_pacpu, "last_level_cache_bytes", lambda: 0)


def test_a_run_writes_rows_for_every_kernel(tiny, tmp_path, capsys, monkeypatch):
    """Every case is held against reads of all the memory: a part that a cache holds in part, or that two threads are
    done with at once, gives another limit."""
    read, sizes = pacpu.read_bandwidth, set()

    def noted(array: torch.Tensor, *, num_threads: int) -> float:
        sizes.add(array.nbytes)
        return read(array, num_threads=num_threads)

    monkeypatch.setattr(pacpu, "read_bandwidth", noted)
    monkeypatch.setattr(attention_choices, "fastest", lambda by_way: "L2")
    before = pacpu.isa()
    bench_pacpu.main(bench_pacpu.Options(quick=True, seconds=0.1, threads=(1, 2), results_dir=tmp_path))
    assert pacpu.isa() == before and sizes == {4 << 20}
    folder = tmp_path / "pacpu" / "latest"
    rows = json.loads((folder / "summary.json").read_text())
    assert (folder / "figure.png").stat().st_size > 10_000 and (folder / "provenance.json").is_file()
    best = next(isa for isa in usable_isas() if isa not in pacpu_cases.BF16_ISAS)
    for name in pacpu.kernels("float16"):
        mine = [r for r in rows if (r["kernel"], r["isa"], r["dtype"]) == (name, best, "float16")]
        assert len(mine) == 2 * 2 * 2  # heads, shapes, teams
        assert all(r["gbps"] > 0 and r["fraction_of_read"] == pytest.approx(r["gbps"] / r["read_gbps"]) for r in mine)
        assert all((r["ratio_to_ispc"] is None) == ("ispc" not in pacpu.kernels()) for r in mine)
    native = [r for r in rows if r["kernel"] == "native"]
    assert {r["isa"] for r in native} == set(usable_isas())
    for r in native:
        ways = pacpu.prefetches(r["dtype"], "MHA" if r["heads"] == r["kv_heads"] else "GQA")
        by_way = {way: r[f"{way}_gbps"] for way in ways}
        assert r["of_fastest_prefetch"] == by_way[r["prefetch"]] / max(by_way.values()) and min(by_way.values()) > 0
        assert r["prefetch"] == "L2"
    assert all(r["prefetch"] is None for r in rows if r["kernel"] != "native")
    codes = [r for r in native if r["dtype"] == "int8"]
    assert {r["isa"] for r in codes} == set(usable_isas()) - set(pacpu_cases.BF16_ISAS)
    for r in rows:
        assert (r["ratio_to_float16"] or 0) > 0 if r in codes else r["ratio_to_float16"] is None
    printed = capsys.readouterr().out
    assert "int8 to float16, GQA 32/8, " in printed
    assert "float16 GQA (AVX-512): " in printed and "medians over shapes" in printed
    assert f" of {len(native)} rows, " in printed and "prefetch in use: within 3% of the fastest in " in printed


def test_shared_blocks_are_measured_in_both_ways(tiny, monkeypatch, tmp_path, capsys):
    """A cost that shares nothing is not the way of the second call."""
    monkeypatch.setattr(pacpu_shared, "QUICK_SHAPES", [Shape(4, 700, shared=640)])
    monkeypatch.setattr(attention_choices, "measure", lambda *_: attention_choices.Measured(RATES, COSTS))
    attended, costs = pacpu.paged_attention, []

    def noted(q: torch.Tensor, *arguments: Any, **options: Any) -> None:
        costs.append(pacpu.shared_row_cost(q.dtype, "MHA" if arguments[0].shape[1] == q.shape[1] else "GQA"))
        attended(q, *arguments, **options)

    monkeypatch.setattr(pacpu, "paged_attention", noted)
    options = bench_pacpu.Options(shared=True, quick=True, seconds=0.1, threads=(1,), results_dir=tmp_path)
    bench_pacpu.main(options)
    rows = json.loads((tmp_path / "pacpu_shared/latest/summary.json").read_text())
    assert [(r["kv_heads"], r["in_use"]) for r in rows] == [(8, False)] * 2 + [(32, True)] * 2
    assert all(r["speedup"] == pytest.approx(r["read_each_ms"] / r["read_once_ms"]) for r in rows)
    assert all(r["sharers"] == 4 and r["fraction_of_read"] > 0 for r in rows)
    assert costs == [7 / 8, 1.0] * 2 + [1 / 4, 1.0] * 2
    assert "640 + 60" in capsys.readouterr().out
    kinds = [calls.split() for calls in COSTS]
    assert {pacpu.shared_row_cost(*kind) for kind in kinds} == {1 / 4, 1.0}  # as before
    for kind in kinds:
        pacpu.set_shared_row_cost(*kind, 1.0)


def test_kernels_that_disagree_are_not_measured(tiny, monkeypatch, tmp_path):
    if len(pacpu.kernels("float16")) < 2:
        pytest.skip("there is one kernel only")
    honest = pacpu_cases.prepare_pacpu

    def prepare(kernel: str, *arguments: Any) -> Any:
        attend = honest(kernel, *arguments)
        return attend if kernel == "native" or attend is None else lambda layer: attend(layer) + 1

    monkeypatch.setattr(pacpu_cases, "prepare_pacpu", prepare)
    with pytest.raises(SystemExit, match="differs from native"):
        bench_pacpu.main(bench_pacpu.Options(quick=True, seconds=0.1, threads=(1,), results_dir=tmp_path))


# -- over the batch size ----------------------------------------------------------------------------------------------


def test_batches_are_measured_by_the_threads_time_and_judged(tiny, monkeypatch, tmp_path, capsys):
    """Each timed run is told to take a second for each 1 GB/s that it should show: rates and ratios follow."""
    if "ispc" not in pacpu.kernels():
        pytest.skip("there is no ISPC kernel to compare with")
    monkeypatch.setattr(bench_batches, "BATCHES", (1, 3))
    monkeypatch.setattr(bench_batches, "CONTEXT", 40)
    monkeypatch.setattr(bench_batches, "MIN_TIMED_BYTES", 1 << 20)
    attended, order = pacpu.paged_attention, []

    def noted(*arguments: Any, **options: Any) -> None:
        order.append(options["kernel"])
        attended(*arguments, **options)

    monkeypatch.setattr(pacpu, "paged_attention", noted)
    gb_s = {"native": 30.0, "llamafile": 18.0, "ispc": 10.0}

    def timed(run: Any) -> float:
        done = len(order)
        run()
        (kernel,) = set(order[done:])
        batch = bench_points[len(order[done:])]
        return batch / (gb_s[kernel] * 1e9)

    cases = {Case(heads, "float16", Shape(batch, 40), 1) for heads in ("GQA", "MHA") for batch in (1, 3)}
    bench_points = {-(-(1 << 20) // case.num_bytes): -(-(1 << 20) // case.num_bytes) * case.num_bytes for case in cases}
    assert len(bench_points) == len(cases)  # the number of calls says which case it was
    monkeypatch.setattr(bench_batches, "timed", timed)
    before = pacpu.isa()
    bench_batches.main(bench_batches.Options(rounds=3, results_dir=tmp_path))
    assert pacpu.isa() == before
    folder = tmp_path / "pacpu-batches" / "latest"
    rows = json.loads((folder / "summary.json").read_text())
    assert [(r["heads"], r["kv_heads"], r["batch"]) for r in rows[:: len(gb_s)]] == [
        (32, 8, 1), (32, 8, 3), (32, 32, 1), (32, 32, 3)
    ]  # fmt: skip
    for r in rows:
        assert r["attention_gb_s"] == pytest.approx(gb_s[r["kernel"]]) and r["rounds"] == 3
        assert r["ratio_to_ispc"] == pytest.approx(gb_s[r["kernel"]] / 10)
    firsts = [kernel for kernel, before in zip(order, [None, *order], strict=False) if kernel != before]
    assert set(firsts) == set(gb_s)
    printed = " ".join(capsys.readouterr().out.split())
    assert "APEX 4.1" in printed and "1.80" in printed and "-10%" in printed
    (item,) = overview(load_claims("pacpu-batches"), [("pacpu-batches", rows)])
    assert item.measured.summary == pytest.approx(1.8) and item.verdict == "agrees within 10%"
    assert item.where == rows[0]["cpu"]
    (item,) = overview(load_claims("pacpu-batches"), [("pacpu", rows)])
    assert item.verdict == "not run"
    assert Section(folder.resolve()).claims[0]["ours"] == "1.80"
