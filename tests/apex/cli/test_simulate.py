"""`apex simulate`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from apex.cli import main
from apex.cli.simulate import Simulate
from apex.cli.traffic import TrafficFlags

REPO = Path(__file__).resolve().parents[3]
SMALL = ("--num-requests", "12", "--input-len", "300", "--output-len", "20", "--num-gpu-blocks", "60")


def simulate(tmp_path: Path, *flags: str) -> list[dict[str, Any]]:
    path = tmp_path / "figures.json"
    assert main(["simulate", *SMALL, *flags, "--output", str(path)]) == 0
    return json.loads(path.read_text())


def fails(capsys, *flags: str) -> str:
    """The one line a command ends with."""
    assert main(["simulate", *flags]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("simulating")]
    assert len(lines) == 1 and lines[0].startswith("apex: ")
    return lines[0]


def test_table_and_figures(capsys, tmp_path):
    records = simulate(tmp_path, "--system", "swiftllm", "neo", "apex")
    out = capsys.readouterr().out
    assert "SIMULATED: llama-3.1-8b (float16) on A10 and 2x Xeon Gold 6342" in out
    assert "12 requests of 300 in / 20 out, all at once; 60 GPU and" in out and "/swiftllm" in out
    assert [record["system"] for record in records] == ["swiftllm", "neo", "apex"]
    for record in records:
        assert record["backend"] == "simulated" and record["completed"] == 12
        assert record["output_tokens_per_s"] * record["makespan_s"] == pytest.approx(12 * 20)
        assert 0 < record["gpu_batch_busy_fraction"] <= 1 and 0 <= record["cpu_busy_fraction"] <= 1
    # Memory is what is short: the CPU must help.
    assert records[1]["output_tokens_per_s"] > records[0]["output_tokens_per_s"]
    assert records[0]["cpu_busy_fraction"] == 0 < records[1]["cpu_busy_fraction"]


def test_agents_come_back_to_what_host_memory_kept(tmp_path):
    """Two conversations, of which the GPU holds one: a cache there alone finds little."""
    flags = ("--workload", "agents", "--num-requests", "16", "--num-gpu-blocks", "1500")
    gpu_only, both = simulate(tmp_path, *flags, "--system", "vllm", "adaptive")
    assert all(record["completed"] == 16 and record["load"] == "turns after answers" for record in (gpu_only, both))
    assert both["output_tokens_per_s"] > 1.3 * gpu_only["output_tokens_per_s"]
    assert both["ttft_s_p50"] < 0.5 * gpu_only["ttft_s_p50"]


def test_a_system_caches_prefixes_in_the_tiers_that_are_named(capsys, tmp_path):
    speeds = {}
    for tiers in ("auto", "gpu", "both"):
        flags = ("--workload", "multi-turn", "--system", "swiftllm", "--prefix-cache-tiers", tiers)
        (record,) = simulate(tmp_path, *flags, "--num-gpu-blocks", "150")
        speeds[tiers] = record["output_tokens_per_s"]
        assert (f"--prefix-cache-tiers {tiers}" in capsys.readouterr().out) == (tiers != "auto")
    assert speeds["both"] > speeds["gpu"] > speeds["auto"]


def test_the_bound_and_what_more_of_each_resource_would_bring(capsys, tmp_path):
    (record,) = simulate(tmp_path, "--system", "adaptive", "--bound")
    out = capsys.readouterr().out
    assert (
        0.2 * record["schedule_bound_tokens_per_s"]
        < record["output_tokens_per_s"]
        < record["schedule_bound_tokens_per_s"]
    )
    assert f"makes more than {record['schedule_bound_tokens_per_s']:,.0f} tok/s" in out
    assert "a GPU that is 10% faster: +" in out and "What binds most is " in out


def test_what_the_bound_does_not_take(capsys):
    assert "requests that arrive one after another" in fails(capsys, *SMALL, "--bound", "--request-rate", "1")
    assert "CPU attention on several hosts" in fails(capsys, *SMALL, "--bound", "--cpu-hosts", "2")
    assert "prompts that share beginnings" in fails(capsys, *SMALL, "--bound", "--workload", "agents")
    assert "outputs of one token" in fails(capsys, *SMALL, "--bound", "--output-len", "1")


def test_there_is_no_bound_where_requests_are_refused(capsys, tmp_path):
    file = tmp_path / "requests.csv"
    file.write_text("arrival_s,input_tokens,output_tokens\n" + "0,100,20\n0,3000,20\n" * 6)
    (record,) = simulate(tmp_path, "--system", "swiftllm", "--bound", "--workload", str(file))
    assert record["failed"] and "schedule_bound_tokens_per_s" not in record
    assert "--bound: there is none, since some requests were refused" in capsys.readouterr().out


def test_tiers_of_a_prefix_cache_are_refused_where_the_engine_refuses_them(capsys):
    model = ("--model", "gpt-oss-20b", "--gpu", "a10", "--prefix-cache-tiers", "both")
    assert "prefix_cache_tiers=both needs a model that keeps all K and V" in fails(capsys, *model)
    model = ("--model", "qwen3.5-9b", "--weights", "int4", "--max-num-seqs", "8", "--prefix-cache-tiers", "gpu")
    assert "prefix_cache_tiers=gpu needs a CPU tier" in fails(capsys, *model, "--num-cpu-blocks", "0")


def test_it_says_how_well_the_card_is_known_and_which_vllm_is_meant(capsys, tmp_path):
    simulate(tmp_path, "--gpu", "rtx-4090", "--system", "swiftllm")
    out = capsys.readouterr().out
    assert "RTX-4090 is known from measured tables of the card's operators with this model" in out
    assert "vllm" not in out
    (record,) = simulate(tmp_path, "--gpu", "h200", "--system", "vllm")
    out = capsys.readouterr().out
    assert "H200-SXM-141GB is known from its data sheet, and assumed shares of it" in out
    assert "vllm: vLLM 0.19 with its defaults" in out
    assert record["completed"] == 12


def test_the_same_command_gives_the_same_figures(tmp_path):
    flags = ("--system", "apex", "--request-rate", "5")
    assert simulate(tmp_path, *flags) == simulate(tmp_path, *flags)
    assert simulate(tmp_path, *flags) != simulate(tmp_path, *flags, "--seed", "1")


def test_requests_come_at_their_rate(tmp_path):
    (at_once,) = simulate(tmp_path, "--system", "swiftllm")
    (slowly,) = simulate(tmp_path, "--system", "swiftllm", "--request-rate", "0.5")
    assert slowly["wall_s"] > 2 * at_once["wall_s"]
    assert slowly["gpu_batch_busy_fraction"] < 0.8  # idle while nobody asks
    assert slowly["per_token_latency_s_mean"] < at_once["per_token_latency_s_mean"]
    (lengths,) = Simulate(traffic=TrafficFlags(request_rate=(4.0,)), num_requests=2000).loads.values()
    arrivals = [row.arrival_s for row in lengths.rows]
    assert arrivals == sorted(arrivals) and arrivals[-1] == pytest.approx(500, rel=0.1)


def test_a_second_class_of_requests_for_a_fixed_time(capsys, tmp_path):
    rest = ("--best-effort-requests", "30", "--best-effort-output-len", "200", "--duration-s", "20")
    targets = ("--ttft-slo-s", "3", "--tpot-slo-s", "0.15")
    records = simulate(tmp_path, "--system", "sarathi", "omniserve", "--request-rate", "2", *rest, *targets)
    out = capsys.readouterr().out
    assert "2 a second, 30 best-effort ones of 300 in / 200 out" in out and "in SLO" in out and "BE tok/s" in out
    for record in records:
        assert record["workload"].endswith("30 best-effort ones of 300 in / 200 out")
        assert record["service_class"] == "both" and (record["ttft_slo_s"], record["tpot_slo_s"]) == (3, 0.15)
        assert record["best_effort_arrived"] == 30 and record["window_s"] == 20
        assert record["best_effort_tokens_per_s"] == record["best_effort_output_tokens"] / 20
    assert records[0]["slo_attainment"] > 0.9
    assert records[1]["best_effort_tokens_per_s"] > records[0]["best_effort_tokens_per_s"] > 0


def test_cpu_bandwidth_is_what_is_said(capsys, tmp_path):
    rates = {}
    for gb_s in ("5", "100"):
        (record,) = simulate(tmp_path, "--system", "fastdecode", "--cpu-bandwidth-gb-s", gb_s)
        assert record["cpu_attention_gb_s"] == float(gb_s)
        assert f"CPU attention at {gb_s} GB/s" in capsys.readouterr().out
        rates[gb_s] = record["output_tokens_per_s"]
    assert rates["100"] > rates["5"]


def test_several_gpus_and_cpu_hosts(capsys, tmp_path):
    gpus = ("--system", "swiftllm", "--tensor-parallel", "2", "--link", "pcie-4")
    (one,), (two,) = simulate(tmp_path, "--system", "swiftllm"), simulate(tmp_path, *gpus)
    assert two["output_tokens_per_s"] > one["output_tokens_per_s"] and two["tensor_parallel"] == 2
    assert "on 2x A10 over PCIe 4.0 and 2x Xeon Gold 6342, CPU" in capsys.readouterr().out
    hosts = ("--system", "neo", "--cpu-hosts", "3", "--network-gbps", "10")
    assert simulate(tmp_path, *hosts)[0]["cpu_hosts"] == 3
    assert re.search(
        r"3 hosts of 2x Xeon Gold 6342, CPU attention at [\d.]+ GB/s on each over 10 Gb/s", capsys.readouterr().out
    )
    assert "--tensor-parallel 2 needs --link" in fails(capsys, "--tensor-parallel", "2")
    assert "does not divide num_heads=32" in fails(capsys, "--tensor-parallel", "3", "--link", "pcie-4")
    assert "cpu_hosts=0 must be at least 1" in fails(capsys, "--cpu-hosts", "0")
    assert "network_gbps=0 must be above 0" in fails(capsys, "--cpu-hosts", "2", "--network-gbps", "0")


def test_blocks_follow_from_the_memories(capsys, tmp_path):
    sizes = [flag for flag in SMALL if flag not in ("--num-gpu-blocks", "60")]
    assert main(["simulate", *sizes, "--system", "swiftllm", "--output", str(tmp_path / "a.json")]) == 0
    (record,) = json.loads((tmp_path / "a.json").read_text())
    block_bytes = 16 * 32 * 8 * 2 * 128 * 2
    weights = 8.03e9 * 2
    assert record["num_gpu_blocks"] == pytest.approx((24e9 * 0.9 - weights) / block_bytes, rel=0.01)
    assert record["num_cpu_blocks"] == pytest.approx(250e9 / 2 / block_bytes, rel=0.01)


def test_timelines_of_several_systems_go_to_a_folder(capsys, tmp_path):
    folder = tmp_path / "timelines"
    simulate(tmp_path, "--system", "neo", "apex", "--trace-timeline", str(folder))
    assert {path.name for path in folder.iterdir()} == {
        f"{system}-timeline.{kind}" for system in ("neo", "apex") for kind in ("json", "png")
    }
    assert capsys.readouterr().out.count("timeline: ") == 2
    trace = json.loads((folder / "neo-timeline.json").read_text())
    assert trace["otherData"]["simulated"] is True and "A10" in trace["otherData"]["setting"]
    assert sum(event.get("cat") == "iteration" for event in trace["traceEvents"]) == 3


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--best-effort-requests", "-1"], ["best_effort_requests=-1"]),
        (["--best-effort-input-len", "5"], ["--best-effort-input-len means nothing without --best-effort-requests"]),
        (["--best-effort-requests", "1", "--best-effort-output-len", "0"], ["best_effort_output_len=0"]),
        (["--duration-s", "0"], ["duration_s=0", "positive number of seconds"]),
        (["--gpu", "a11"], ["a10, a100, a30", "Did you mean a10?"]),
        (["--host", "g5.4xlarge"], ["dual-xeon-6342", "Did you mean g5-4xlarge?"]),
        (["--model", "llama-8b"], ["llama-2-7b", "Did you mean llama-3.1-8b?"]),
        (["--cpu-kernel", "magic"], ["magic", "native"]),
        (["--gpu", "t4", "--dtype", "bfloat16"], ["float16"]),
        (["--cpu-bandwidth-gb-s", "-1"], ["cpu_bandwidth_gb_s=-1.0 must be positive"]),
        (["--cpu-bandwidth-gb-s", "nan"], ["cpu_bandwidth_gb_s=nan must be positive and finite"]),
        (["--cpu-bandwidth-gb-s", "inf"], ["cpu_bandwidth_gb_s=inf must be positive and finite"]),
        (["--cpu-hosts", "2", "--network-gbps", "nan"], ["network_gbps=nan must be above 0 and finite"]),
        (["--min-cpu-request-ratio", "nan"], ["min_cpu_request_ratio=nan must not be negative"]),
        (
            ["--model", "llama-3.1-70b", "--tensor-parallel", "2", "--link", "pcie-4"],
            ["takes 141.1 GB", "larger --gpu"],
        ),
        (["--model", "qwen2.5"], ["Did you mean qwen2.5-7b?", "Near are qwen2.5-3b"]),
        (["--host-memory-gib", "0"], ["host_memory_gib=0.0 must be positive"]),
        (["--host-read-gb-s", "nan"], ["host_read_gb_s=nan must be positive"]),
        (["--workload", "sharegtp"], ["'sharegtp', and no such file is here", "did you mean sharegpt"]),
        (["--trace-arrivals"], ["--trace-arrivals means nothing without --workload"]),
        (["--workload", "sharegpt", "--trace-arrivals"], ["trace sharegpt is drawn and has no arrivals"]),
        (["--slo-ttft", "0"], ["slo_ttft=0.0 must be a positive number of seconds"]),
        (["--plot", "here"], ["--plot draws over the request rate: give --request-rate"]),
        (["--plot", "/dev/null/x", "--request-rate", "1"], ["--plot: the folder /dev/null/x cannot be"]),
        (["--trace-timeline", "here", "--request-rate", "1", "2"], ["records one run of a system: give one"]),
        (["--num-gpu-blocks", "99999"], ["num_gpu_blocks=99999", "at most"]),
        (["--num-requests", "0"], ["num_requests=0 must be at least 1"]),
        (["--request-rate", "0"], ["request_rate=0.0 must be a positive number"]),
        (["--input-len", "200000"], ["max_model_len"]),
        (["--system", "neo", "--strategy", "asynchronous-overlap"], ["--system apex"]),
        (["--system", "swiftllm", "--max-cpu-batches", "3"], ["the strategy flags"]),
        (["--system"], ["--system needs the name of at least one"]),
        (["--link", "pcie-4"], ["--link means nothing without --tensor-parallel"]),
        (["--network-gbps", "10"], ["--network-gbps means nothing without --cpu-hosts"]),
        (["--system", "vllm", "--num-gpu-blocks", "0"], ["no KV blocks: raise num_gpu_blocks"]),
        (["--trace-timeline", "one.json"], ["3 systems need a folder"]),
        (["--timeline-iterations", "4"], ["mean nothing without --trace-timeline"]),
        (["--trace-timeline", "here", "--timeline-iterations", "0"], ["must be at least 1"]),
        (["--output", "/dev/null/x.json"], ["--output: the folder /dev/null cannot be"]),
        (["--output", "/"], ["--output / is a folder"]),
        (["--trace-timeline", "/dev/null/x"], ["--trace-timeline: the folder /dev/null/x cannot be"]),
    ],
)
def test_bad_input_ends_as_one_line(capsys, flags, parts):
    message = fails(capsys, *flags)
    assert all(part in message for part in parts), message


def test_unknown_system_names_those_there_are(capsys):
    with pytest.raises(SystemExit) as end:
        main(["simulate", "--system", "vlm"])
    assert end.value.code == 2
    assert "swiftllm" in capsys.readouterr().err


def test_a_window_after_the_end_is_said_and_costs_no_figures(capsys, tmp_path):
    simulate(tmp_path, "--system", "swiftllm", "--trace-timeline", str(tmp_path), "--timeline-start", "9999")
    told = capsys.readouterr()
    assert "start earlier" in told.err and "tok/s" in told.out


def test_a_run_too_short_for_its_requests_says_why_it_has_no_figures(capsys, tmp_path):
    (record,) = simulate(tmp_path, "--system", "swiftllm", "--duration-s", "0.1")
    assert record["output_tokens_per_s"] is None
    assert "swiftllm: 12 of 12 requests were refused or cut short" in capsys.readouterr().out
    simulate(tmp_path, "--system", "swiftllm")
    assert "cut short" not in capsys.readouterr().out


def test_a_run_that_refuses_every_request_says_why_and_fails(capsys, tmp_path):
    flags = ["--system", "sarathi", "--ttft-slo-s", "0.001", "--output", str(tmp_path / "figures.json")]
    assert main(["simulate", *SMALL, *flags]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("apex: ")]
    assert line.startswith("apex: sarathi refused every request, the first one because: ") and "first token" in line
    assert json.loads((tmp_path / "figures.json").read_text())[0]["completed"] == 0


def test_years_between_arrivals_take_no_time(tmp_path):
    (record,) = simulate(tmp_path, "--system", "swiftllm", "--request-rate", "1e-9")
    assert record["completed"] == 12 and record["wall_s"] > 1e9


@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_gpu_batch_of_few_tokens(tmp_path, most):
    sizes = ("--max-num-batched-tokens", str(most), "--num-requests", "2", "--input-len", "5", "--output-len", "2")
    assert all(record["completed"] == 2 for record in simulate(tmp_path, *sizes))


def test_it_needs_no_kernels_and_loads_no_drawing_library():
    code = (
        "import sys; sys.modules['pacpu'] = None\n"
        "from apex.cli import main\n"
        "print('torch' in sys.modules, end=' ')\n"
        "main(['simulate', '--system', 'apex', '--num-requests', '2', '--output-len', '3'])\n"
        "print('matplotlib' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith("False ") and answer.stdout.endswith("False\n")
