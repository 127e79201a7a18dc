"""Workloads, rates and targets of `apex simulate` and `apex bench`: tables, plots, the choice, the line to serve."""

from __future__ import annotations

import csv
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from apex.cli import main
from apex.cli.advice import binding, choose, serve_line
from apex.cli.config_file import parse_command
from apex.cli.serve import Serve
from apex.cli.simulate import Simulate
from apex.cli.systems_command import Remaining
from apex.cli.traffic import SERVICE_COLUMNS, TrafficFlags
from apex.simulator.hardware.files import known_model, load_host, load_model_config, model_origins
from apex.simulator.prediction.host_times import host_read_gb_s
from apex.strategy import StrategyConfig
from swiftllm.machine import GIB

T4 = ("--gpu", "t4", "--host-memory-gib", "32", "--model", "Qwen2.5-7B")
SHORT = ("--num-requests", "24", "--input-len", "200", "--output-len", "20")
TRACE = "arrival_s,input_tokens,output_tokens\n" + "".join(f"{0.5 * i},{100 + 10 * i},{5 + i % 4}\n" for i in range(20))


def simulate(tmp_path: Path, *flags: str) -> list[dict[str, Any]]:
    path = tmp_path / "figures.json"
    assert main(["simulate", *flags, "--output", str(path)]) == 0
    return json.loads(path.read_text())


def serve_of(out: str) -> Serve:
    """The command in the last line."""
    words = shlex.split(out.splitlines()[-1])
    assert words[:2] == ["apex", "serve"]
    return parse_command(Serve, "apex serve", words[2:])


def test_a_machine_is_asked_what_it_does_with_a_workload(capsys, tmp_path):
    targets = ("--slo-ttft", "3", "--slo-tpot", "0.25", "--plot", str(tmp_path / "plot"))
    flags = (
        "--workload",
        "sharegpt",
        "--num-requests",
        "20",
        "--request-rate",
        "0.5",
        "2",
        "--system",
        "swiftllm",
        "apex",
    )
    records = simulate(tmp_path, *T4, *flags, *targets)
    out, err = capsys.readouterr()
    assert [(r["request_rate"], r["system"]) for r in records] == [
        (0.5, "swiftllm"),
        (0.5, "apex"),
        (2, "swiftllm"),
        (2, "apex"),
    ]
    for record in records:
        assert (record["ttft_target_s"], record["tpot_target_s"]) == (3, 0.25) and record["completed"] == 20
        assert record["model"] == "qwen2.5-7b" and record["host"] == "2x Xeon Gold 6342 with 32 GiB"
    table = out[out.index("\nSIMULATED  ") :]
    assert all(title in table for title, _, _ in SERVICE_COLUMNS)
    assert f"{records[3]['ttft_s_p99']:.2f}" in table and f"{records[3]['tpot_s_p50']:.3f}" in table
    assert "a first token within 3 s and 0.25 s per further token" in out
    # Weights of 15.2 GB exceed a T4, which is told with what can be done.
    assert "takes 15.2 GB in float16, and T4 may use 14.4 of its 16 GB" in out
    assert "whose 48 cores read 328 GB/s: name yours with --host" in out
    assert "simulating: 1 of 4 runs have ended, about " in err and "4 of 4" not in err
    served = serve_of(out)
    placed = {r["weights_gpu_gib"] for r in records if r["system"] == served.system}
    assert served.model == "Qwen/Qwen2.5-7B-Instruct" and served.engine.weights_gpu_memory in placed
    choice, smaller, _ = out.splitlines()[-3:]
    assert choice.startswith("SIMULATED: Choose ") and "What binds at 2 requests a second" in choice
    assert smaller.startswith("A 4-bit checkpoint (AWQ or GPTQ) takes 5.6 GB") and "see --weights int4" in smaller
    with (tmp_path / "plot" / "service.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["how"], row["system"]) for row in rows] == [("SIMULATED", record["system"]) for record in records]
    assert [float(row["tpot_s_p99"]) for row in rows] == [record["tpot_s_p99"] for record in records]
    assert (tmp_path / "plot" / "service.png").read_bytes().startswith(b"\x89PNG")


def test_without_targets_there_is_no_goodput_and_tokens_decide(capsys, tmp_path):
    simulate(tmp_path, *SHORT, "--workload", "osc", "--system", "swiftllm", "--request-rate", "1")
    out = capsys.readouterr().out
    assert "goodput" not in out and "TTFT p50" in out and "OSC: " in out
    assert "Choose swiftllm: it reaches " in out and "tok/s at 1 request a second." in out
    assert "Nothing binds at 1 request a second" in out


def test_the_drawing_says_what_is_simulated():
    from apex.replay.figure import draw_service

    fields = [f"{name}_s_{part}" for name in ("ttft", "tpot") for part in ("p50", "p99")] + ["goodput_requests_per_s"]
    base = {"ttft_target_s": 2.0, "tpot_target_s": 0.2, **dict.fromkeys(fields, 0.5)}
    records = [
        {**base, "system": system, "request_rate": rate} for system in ("apex", "a-new-one") for rate in (4, 1, 2)
    ]
    records.append({**base, "system": "apex", "request_rate": None})
    records[1]["tpot_s_p99"] = None  # nothing was served
    figure = draw_service(records, "a machine", "SIMULATED")
    assert figure.texts[0].get_text() == "SIMULATED"
    assert all(ax.get_title(loc="left").startswith("SIMULATED: ") for ax in figure.axes)
    assert [list(line.get_xdata()) for line in figure.axes[2].lines[:2]] == [[1, 2, 4]] * 2
    assert list(figure.axes[1].lines[0].get_xdata()) == [2, 4]
    assert len({line.get_color() for line in figure.axes[2].lines}) == 3


def test_a_workload_in_a_file_arrives_as_it_says_or_at_a_rate(capsys, tmp_path):
    path = tmp_path / "monday.csv"
    path.write_text(TRACE)
    flags = ("--workload", str(path), "--num-requests", "20", "--system", "swiftllm", "--trace-arrivals")
    at_rate, as_it_says = simulate(tmp_path, *flags, "--request-rate", "4")
    assert (at_rate["load"], as_it_says["load"]) == ("4 a second", "its own arrivals")
    assert as_it_says["request_rate"] is None and 9.5 < as_it_says["makespan_s"] < 12
    assert as_it_says["output_tokens"] == sum(5 + i % 4 for i in range(20))
    assert "20 requests of monday" in capsys.readouterr().out
    path.write_text(TRACE + "11,5\n")
    assert main(["simulate", *flags]) == 2
    assert f"apex: {path}:22: 2 cells where the header has 3" in capsys.readouterr().err


def test_requests_longer_than_the_model_takes_are_results(capsys, tmp_path):
    path = tmp_path / "long.jsonl"
    rows = [{"arrival_s": i, "input_tokens": 40_000 if i == 3 else 50, "output_tokens": 5} for i in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--model", "qwen2.5-3b", "--system", "swiftllm", "--workload", str(path), "--num-requests", "8")
    (record,) = simulate(tmp_path, *flags, "--trace-arrivals")
    assert (record["completed"], record["failed"]) == (7, 1)
    assert "swiftllm: 1 of 8 requests were refused or cut short" in capsys.readouterr().out


def test_the_host_is_as_large_and_fast_as_its_owner_says():
    host = load_host("dual-xeon-6342")
    given = host.with_given(memory_gib=32, read_gb_s=40)
    assert given["memory_gb"] == pytest.approx(32 * GIB / 1e9) and host_read_gb_s(given) == pytest.approx(40)
    assert given["cores"] == host["cores"] and host.with_given() == host
    assert given.name == "2x Xeon Gold 6342 with 32 GiB, read at 40 GB/s"
    for name in ("memory_gib", "read_gb_s"):
        with pytest.raises(ValueError, match=f"host_{name}=-1"):
            host.with_given(**{name: -1})


def test_a_slower_host_attends_more_slowly_and_a_smaller_one_holds_less(tmp_path):
    flags = (*SHORT, "--num-gpu-blocks", "60", "--system", "fastdecode")
    (usual,), (slow,) = simulate(tmp_path, *flags), simulate(tmp_path, *flags, "--host-read-gb-s", "20")
    (small,) = simulate(tmp_path, *flags, "--host-memory-gib", "16")
    assert slow["cpu_attention_gb_s"] < 20 < usual["cpu_attention_gb_s"]
    assert slow["output_tokens_per_s"] < usual["output_tokens_per_s"]
    assert small["num_cpu_blocks"] == pytest.approx(usual["num_cpu_blocks"] * 16 * GIB / 250e9, rel=0.01)


def test_weights_are_placed_for_as_many_requests_as_the_rate_needs(capsys, tmp_path):
    flags = ("--workload", "sharegpt", "--num-requests", "40", "--request-rate", "0.1", "8", "--system", "swiftllm")
    slow, fast = simulate(tmp_path, *T4, *flags)
    assert slow["stages_off_gpu"] < fast["stages_off_gpu"] and slow["num_gpu_blocks"] < fast["num_gpu_blocks"]
    assert slow["weights_gpu_gib"] > fast["weights_gpu_gib"] and slow["tpot_s_p50"] < fast["tpot_s_p50"]
    assert "\nswiftllm, 0.1 a second: 29 stages: " in capsys.readouterr().out


def test_models_have_names_in_any_case_and_on_the_hub():
    assert known_model("QWEN2.5-7b") == known_model("Qwen/Qwen2.5-7B-Instruct") == "qwen2.5-7b"
    assert known_model("Qwen/Qwen2.5-7B") is known_model("configs/models/qwen2.5-7b") is None
    assert load_model_config("Phi-4-Mini").num_layers == 32
    for name in model_origins():
        assert load_model_config(name).num_layers


LOADS = ("1 a second", "2 a second")


def record(system: str, load: str, **figures: Any) -> dict[str, Any]:
    usual = {
        "request_rate": float(load[0]), "output_tokens_per_s": 100.0, "goodput_requests_per_s": 1.0, "ttft_s_p99": 1.0,
        "tpot_s_p99": 0.1, "gpu_batch_busy_fraction": 0.5, "cpu_busy_fraction": 0.0, "requests_under_way": 5.0,
        "gpu_tier_requests": 20.0, "stages": 29, "stages_off_gpu": 0,
    }  # fmt: skip
    return {"system": system, "load": load, **usual, **figures}


def test_the_system_with_the_most_goodput_is_chosen_and_of_equals_the_first():
    goodputs = {"swiftllm": (1.0, 0.2), "neo": (0.9, 1.99), "apex": (0.9, 2.0)}
    records = [
        record(system, load, goodput_requests_per_s=goodputs[system][i])
        for i, load in enumerate(LOADS)
        for system in goodputs
    ]
    choice = choose(records, by_goodput=True)
    assert choice.record["system"] == "neo" and choice.sentence == (
        "Choose neo: it reaches 1.99 requests/s within the targets at 2 requests a second, against 1.00 with swiftllm, "
        "2.00 with apex."
    )
    by_tokens = [one | {"output_tokens_per_s": 120.0 if one["system"] == "apex" else 100.0} for one in records]
    assert choose(by_tokens, by_goodput=False).record["system"] == "apex"
    late = [one | {"goodput_requests_per_s": 0.0, "ttft_s_p99": 9.0 - 2 * (one["system"] == "neo")} for one in records]
    assert choose(late, by_goodput=True).sentence.startswith("No request meets both targets at these loads: neo has")
    assert choose([one | {"goodput_requests_per_s": None} for one in records], by_goodput=True) is None


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({}, "Nothing binds at 2 requests a second: the GPU batch computes 50% of the time"),
        (
            {"gpu_batch_busy_fraction": 0.95},
            "is the GPU itself: it computes 95% of the time for the 5 requests under way",
        ),
        (
            {"requests_under_way": 30.0},
            "the KV cache of 20 requests of mean size while 30 are under way, and the others wait",
        ),
        ({"requests_under_way": 30.0, "cpu_busy_fraction": 0.4}, "and the CPU attends to the others"),
        ({"stages_off_gpu": 9, "gpu_batch_busy_fraction": 1.0}, "are the weights: 9 of 29 stages are not on the GPU"),
    ],
)
def test_what_binds_is_told_at_the_heaviest_load(figures, words):
    first, heaviest = record("apex", LOADS[0]), record("apex", LOADS[1], **figures)
    assert words in binding(first, [first, heaviest, record("neo", LOADS[1], requests_under_way=99.0)])


@pytest.mark.parametrize("system", ["vllm", "swiftllm", "neo", "apex", "omniserve"])
def test_the_line_that_serves_is_one_that_serve_takes(system):
    options = {
        "dtype": "bfloat16", "weights_gpu_memory": 9.5, "max_num_batched_tokens": 100, "max_num_seqs": 7,
        "num_gpu_blocks": 20, "num_cpu_blocks": None, "block_size": 32, "cpu_kernel": "native", "cpu_kv_dtype": "int8",
        "attention_hosts": "HOST1:7300,HOST2:7300",
    }  # fmt: skip
    strategy = StrategyConfig(disable_online_correction=True, max_cpu_batches=3, ttft_slo_s=1.5)
    line = serve_line("a folder/model", record(system, LOADS[0]), options, strategy)
    served = serve_of(line)
    assert (served.model, served.system) == ("a folder/model", system)
    assert {name: getattr(served.engine, name) for name in options} == options
    given = strategy if system in ("neo", "apex", "omniserve") else StrategyConfig()
    assert served.strategy.config(system) == replace(given)


def test_every_option_of_a_machine_reaches_the_line_that_serves(capsys, tmp_path):
    flags = ("--model", "llama-2-7b", "--block-size", "32", "--cpu-kv-dtype", "int8", "--cpu-hosts", "3")
    simulate(tmp_path, *SHORT, *flags, "--system", "neo", "--max-num-seqs", "50", "--disable-cpu-decode-limit")
    served = serve_of(capsys.readouterr().out)
    assert served.engine.attention_hosts == "HOST1:7300,HOST2:7300" and served.engine.cpu_kv_dtype == "int8"
    assert served.engine.block_size == 32 and served.engine.max_num_seqs == 50
    assert served.strategy.disable_cpu_decode_limit and served.model == "meta-llama/Llama-2-7b-chat-hf"


def test_what_remains_is_told_by_the_tokens(capsys, monkeypatch):
    times = iter([0.0, 10.0, 30.0])
    monkeypatch.setattr("apex.cli.systems_command.time.monotonic", lambda: next(times))
    remaining = Remaining("bench", [100, 200, 300])
    for _ in range(3):
        remaining.ended()
    assert capsys.readouterr().err == (
        "bench: 1 of 3 runs have ended, about 50 s to go\nbench: 2 of 3 runs have ended, about 30 s to go\n"
    )


def test_targets_are_those_that_schedulers_plan_by():
    strategy = TrafficFlags(slo_ttft=1.0).with_targets(StrategyConfig(tpot_slo_s=0.3))
    assert (strategy.ttft_slo_s, strategy.tpot_slo_s) == (1.0, 0.3)


def test_the_requests_of_one_size_are_of_that_size():
    loads = Simulate(num_requests=3, input_len=70, output_len=9, traffic=TrafficFlags(request_rate=(1.0, 2.0))).loads
    assert list(loads) == ["1 a second", "2 a second"]
    assert all((row.input_tokens, row.output_tokens) == (70, 9) for one in loads.values() for row in one.rows)
