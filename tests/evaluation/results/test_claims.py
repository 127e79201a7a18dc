"""The papers' claims: each is whole and held against rows of its own machine and kind; assumptions are told once."""

from __future__ import annotations

import io

import pytest
import yaml
from rich.console import Console

from apex.simulator.paper_settings import load_setting
from evaluation.results.claims import (
    CLAIMS_FILE,
    Claim,
    assumptions,
    beside_each_other,
    compare_claims,
    load_claims,
    print_claims,
)


def record(system, rate, output_len=100.0, workload="osc", setting="apex-t4", **more):
    values = {"system": system, "backend": "simulated", "workload": workload, "setting": setting}
    values |= {"setting_title": "T4", "output_len": output_len, "request_rate": None, "output_tokens_per_s": rate}
    return values | {"cpu_bandwidth_gb_s": None, "gpu_attention_gb_s": 272.0} | more


def claim(**changes):
    base = {"figure": "fig5", "section": "5.2", "hardware": "T4", "workload": "osc", "metric": "output_tokens_per_s"}
    return Claim(**{**base, "systems": ("apex", "neo"), "ratio": 1.5, "up_to": True, **changes})


def test_every_claim_of_the_file_is_whole():
    entries = yaml.safe_load(CLAIMS_FILE.read_text())
    claims = load_claims(*{entry["figure"] for entry in entries})
    assert len(claims) == len(entries)
    for item in claims:
        assert item.section and (item.ratio or item.words) and len(item.systems) in (1, 2)
        if item.setting and item.section.startswith("APEX"):
            assert load_setting(item.setting).title.startswith(item.hardware)


def test_a_claim_about_one_system_is_about_a_share_and_may_be_limited_to_points() -> None:
    rows = [
        record("neo", 1.0, share=share, tpot_slo_s=target) for share, target in ((0.9, 0.1), (0.7, 0.2), (0.0, 0.3))
    ]
    everywhere, there, nowhere = compare_claims(
        [claim(systems=("neo",), metric="share", at=at) for at in (None, {"tpot_slo_s": 0.2}, {"tpot_slo_s": 0.3})],
        rows,
    )
    assert (everywhere.summary, there.summary, nowhere.summary) == (0.9, 0.7, None)
    assert nowhere.ran  # its value is 0, so that there is no ratio


def test_an_up_to_is_held_against_the_best_and_another_against_the_mean():
    rows = [record("neo", 100.0), record("apex", 120.0), record("neo", 100.0, 200.0), record("apex", 180.0, 200.0)]
    best, mean, short = compare_claims(
        [claim(), claim(up_to=False), claim(up_to=False, output_lens=(50, 150))], [*rows, record("apex", 9.0, 300.0)]
    )
    assert best.ours == pytest.approx((1.2, 1.8)) and best.summary == pytest.approx(1.8)
    assert best.differs == "+20%"
    assert best.best_at == "200 out" and mean.best_at == short.best_at == ""
    assert mean.summary == pytest.approx(1.5) and mean.differs == "+0%"
    assert short.ours == pytest.approx((1.2,))


def test_our_own_system_beside_the_papers_changes_no_claim():
    claims = load_claims()
    assert not any("adaptive" in item.systems for item in claims)
    rows = [record("swiftllm", 50.0), record("neo", 100.0), record("apex", 120.0)]
    assert compare_claims(claims, [*rows, record("adaptive", 500.0)]) == compare_claims(claims, rows)


def test_a_latency_at_best_is_the_lowest():
    rows = [record("neo", 1.0, per_token_latency_s_mean=2.0), record("apex", 1.0, per_token_latency_s_mean=1.0)]
    rows += [
        record("neo", 1.0, 9.0, per_token_latency_s_mean=1.0),
        record("apex", 1.0, 9.0, per_token_latency_s_mean=1.0),
    ]
    (item,) = compare_claims([claim(metric="per_token_latency_s_mean", ratio=0.5)], rows)
    assert item.summary == pytest.approx(0.5)


def test_claims_keep_to_their_machine_and_find_a_stand_in():
    rows = [record("swiftllm", 100.0), record("apex", 200.0)]
    rows += [record("swiftllm", 100.0, setting="neo-t4"), record("apex", 700.0, setting="neo-t4")]
    (item,) = compare_claims([claim(systems=("apex", "vllm"), setting="apex-t4")], rows)
    assert item.systems == ("apex", "swiftllm") and item.ours == pytest.approx((2.0,))
    (measured,) = compare_claims(
        [claim(systems=("apex", "vllm"), setting="apex-t4")], [r | {"setting": None} for r in rows[:2]]
    )
    assert measured.ours == pytest.approx((2.0,))


def test_measured_and_simulated_are_never_mixed():
    rows = [record("neo", 100.0), record("apex", 120.0)]
    small = {"backend": "torch-cpu", "setting": None}
    rows += [record("neo", 100.0, **small), record("apex", 300.0, **small)]
    out = io.StringIO()
    print_claims([claim()], rows, Console(file=out, width=120))
    simulated, measured = out.getvalue().split("MEASURED")
    assert "SIMULATED" in simulated and "1.20" in simulated and "-20%" in simulated
    assert "3.00" in measured and "+100%" in measured


@pytest.mark.parametrize(
    "differs", [{"gpu": None}, {"papers_model": False}, {"scale": 0.1}], ids=["on-a-cpu", "part-of-a-model", "scaled"]
)
def test_what_is_no_measurement_of_a_setting_is_not_compared_with_claims(differs):
    here = {"backend": "torch-cuda", "gpu": "Tesla T4", "setting_title": "T4", "papers_model": True, "scale": 1}

    def printed(**changes) -> str:
        out = io.StringIO()
        rows = [record(system, rate, **{**here, **changes}) for system, rate in (("neo", 100.0), ("apex", 171.0))]
        print_claims([claim()], rows, Console(file=out, width=120))
        return out.getvalue()

    assert "1.71" in printed() and printed(**differs) == ""


def test_a_server_started_here_is_compared_with_the_engines_measured_here():
    here = {"gpu": "Tesla T4", "setting_title": "T4 + Llama-2-7B"}
    rows = [record("vllm", 100.0, backend="server", **here), record("apex", 190.0, backend="torch-cuda", **here)]
    small = [record(system, 50.0, backend="torch-cpu", setting=None) for system in ("swiftllm", "apex")]
    out = io.StringIO()
    print_claims([claim(systems=("apex", "vllm"))], [*rows, *small], Console(file=out, width=120))
    paper, other = out.getvalue().split("ratios MEASURED here")[1:]
    assert paper.startswith(" (T4 + Llama-2-7B, Tesla T4)") and "apex/vllm" in paper and "1.90" in paper
    assert other.startswith(" (torch-cpu, another model)") and "apex/swiftllm" in other and "1.00" in other


def test_a_stand_in_replaces_a_system_only_where_it_was_not_run():
    rows = [record("swiftllm", 100.0), record("vllm", 50.0), record("apex", 200.0)]
    rows += [record("swiftllm", 100.0, workload="livebench"), record("apex", 300.0, workload="livebench")]
    pair = ("apex", "vllm")
    run, failed, none = compare_claims([claim(systems=pair, workload=w) for w in ("osc", "livebench", "x")], rows)
    assert run.systems == pair and run.ours == pytest.approx((4.0,))
    assert failed.systems == ("apex", "swiftllm") and failed.ours == pytest.approx((3.0,))
    assert none.systems == pair and none.ours == ()


def test_assumptions_are_told_once_for_machines_that_differ_in_their_host():
    pool = {"num_gpu_blocks": 54, "num_gpu_blocks_status": "assumed", "max_gpu_blocks": 300, "gpu_option": "t4"}
    rows = [
        record(system, 1.0, setting_title=f"T4 ({host})", gpu="T4", model="7B", cpu_bandwidth_gb_s=rate, **pool)
        for host, rate in (("small", 68.0), ("large", 136.0))
        for system in ("neo", "apex")
    ]
    other = [{**row, "gpu": "A10", "setting_title": "A10", "gpu_option": "a10"} for row in rows[:1]]
    lines = assumptions([*rows, *other, record("swiftllm", 1.0)], "reproduce_x.py")
    assert len(lines) == 4
    assert lines[0].startswith("T4 (2 hosts): ") and "54 blocks of 16 tokens (assumed" in lines[0]
    assert "neo 68-136 GB/s (25%-50%), apex 68-136 GB/s" in lines[0]
    assert "reproduce_x.py --gpu t4 --sensitivity gpu_blocks=54..300" in lines[1] and "cpu_bandwidth=" in lines[1]
    assert lines[2].startswith("A10: ") and "neo 68 GB/s (25%)" in lines[2]


def test_readings_of_a_machine_stand_beside_each_other_each_with_its_verdict() -> None:
    readings = {"as APEX measured": ("apex-t4-as-measured", 150.0), "with today's kernels": ("apex-t4", 110.0)}
    rows = [
        record(name, rate, setting=setting, reading=reading, paper_setting="apex-t4", num_gpu_blocks=9, gpu="T4")
        | {"num_gpu_blocks_status": "assumed", "max_gpu_blocks": 10, "gpu_option": "t4", "model": "m"}
        for reading, (setting, ours) in readings.items()
        for name, rate in (("neo", 100.0), ("apex", ours))
    ]
    about = claim(setting="apex-t4")
    head, lines = beside_each_other([about], [rows[:2], rows[2:]])
    assert head[3:] == ("ours,\nas APEX measured", "verdict", "ours,\nwith today's kernels", "verdict")
    assert lines == [("5.2: T4, osc", "apex/neo", "up to 1.50", "1.50", "agrees", "1.10", "smaller")]
    console = Console(file=io.StringIO(), width=200)
    print_claims([about], rows, console)
    printed = console.file.getvalue()
    assert printed.count("5.2: T4, osc") == 1 and "Agrees: our ratio is within 10%" in printed
