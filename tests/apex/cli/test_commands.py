"""generate, bench, profile and their flags on a tiny model: what each prints and writes, and how it fails."""

from __future__ import annotations

import dataclasses
import gzip
import inspect
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import swiftllm
from apex.cli import main
from apex.cli.bench import correction_line
from apex.cli.commands import COMMANDS
from apex.cli.flags import SystemName
from apex.cli.profile import attention_rate, key_figures
from apex.cli.systems_command import figures_table
from apex.cli.traffic import SERVICE_COLUMNS
from apex.cli.validate import OPTIONAL_VERBS
from apex.perf.model import Curve, ProfileTable, Surface
from apex.strategy import StrategyConfig
from swiftllm.config import EngineConfig
from swiftllm.core.request import SamplingParams
from swiftllm.engine.engine import Engine
from tests.reference.missing_package import error_without
from tests.reference.tiny_model import make_tiny_llama

REPO = Path(__file__).resolve().parents[3]
SMALL = ["--num-gpu-blocks", "8", "--num-cpu-blocks", "64", "--dtype", "float32", "--max-num-batched-tokens", "32"]


def standard_input(text: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(text.encode()))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("APEX_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(scope="module")
def model(tmp_path_factory, cache) -> str:
    """A tiny model with a tokenizer of single bytes and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder = make_tiny_llama(tmp_path_factory.mktemp("model"), vocab_size=256, eos_token_id=None)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    fast.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def wide_help(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def help_of(capsys, *command: str) -> str:
    with pytest.raises(SystemExit) as end:
        main([*command, "--help"])
    assert end.value.code == 0
    return capsys.readouterr().out


def fails(capsys, *arguments: str) -> str:
    """The one line a command ends with."""
    assert main(arguments) == 2
    told = ("profiling", "GPU tier", "CPU tier", "GPU batch", "CPU attention")
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith(told)]
    assert len(lines) == 1 and lines[0].startswith("apex: ")
    return lines[0]


def test_help_lists_the_commands_and_loads_no_torch():
    code = "import sys; from apex.cli import main\ntry: main(['--help'])\nfinally: print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stderr
    assert all(name in answer.stdout for name in (*COMMANDS, *OPTIONAL_VERBS))
    assert answer.stdout.endswith("False\n")


def test_python_m_apex_is_the_command():
    command = [sys.executable, "-m", "apex", "benc"]
    answer = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 2 and answer.stderr == "apex: no command is called 'benc': did you mean bench?\n"


def test_the_overview_is_whole_sentences_and_there_is_a_version(capsys):
    assert main(["--help"]) == 0
    for verb, command in COMMANDS.items():
        assert inspect.getdoc(command).partition("\n")[0].endswith((".", "?")), verb
    capsys.readouterr()
    assert main(["--version"]) == 0 and capsys.readouterr().out == f"apex {swiftllm.__version__}\n"


def test_system_names_are_those_of_the_registry():
    from swiftllm.systems import systems

    assert get_args(SystemName) == tuple(systems())


OF_THE_SERVER = ("logit_bias", "logprobs", "prompt_logprobs", "bad_words", "allowed_token_ids", "grammar")
"""Sampling parameters that the commands do not take."""


def test_every_option_of_engine_and_strategy_is_a_flat_flag_with_its_help(capsys, wide_help):
    text = help_of(capsys, "generate")
    for configuration in (EngineConfig, StrategyConfig, SamplingParams):
        for item in dataclasses.fields(configuration):
            if item.name not in ("model", *OF_THE_SERVER):
                flag = item.name.replace("_", "-")
                assert f"--{flag} " in text or f"--no-{flag} " in text, item.name
    assert "Tokens per KV-cache block, in both tiers." in text
    assert "--engine." not in text and "MODEL" in text


def test_unknown_flag_names_the_nearest(capsys, wide_help):
    with pytest.raises(SystemExit) as end:
        main(["bench", "folder", "--num-gpu-block", "3"])
    assert end.value.code == 2
    assert "--num-gpu-blocks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["generate", "/nowhere", "hi"], "/nowhere/config.json is missing"),
        (["generate", "MODEL", "hi", "--num-gpu-blocks", "-3"], "num_gpu_blocks=-3 must not be negative"),
        (["generate", "MODEL", "hi", "--top-p", "3"], "top_p=3.0 must be in (0, 1]"),
        (["generate", "MODEL", "hi", "--cpu-kernel", "magic"], "magic"),
        (["generate", "MODEL", "hi", "--system", "swiftllm", "--num-gpu-blocks", "99999999999"], "memory"),
        (["generate", "MODEL", "hi", "--system", "swiftllm", "--max-cpu-batches", "3"], "the strategy flags"),
        (["generate", "MODEL", "hi", "--max-tokens", "9999", "--system", "swiftllm"], "max_model_len=512"),
        (["generate", "MODEL", "hi", "--profile", "/nowhere.json", *SMALL], "run `apex profile` first"),
        (["generate", "MODEL", "\udcff\udcfe"], "is not UTF-8"),
        (["generate", "MODEL", "hi", "--max-model-len", "1000000000000"], "exceeds the 512 tokens"),
        (["generate", "MODEL", "hi", "--system", "vllm", "--num-gpu-blocks", "0"], "raise num_gpu_blocks"),
        (["bench", "MODEL", "--system"], "--system needs the name of at least one"),
        (["bench", "MODEL", "--num-requests", "0"], "num_requests=0 must be at least 1"),
        (["bench", "MODEL", "--output", "/dev/null/x.json"], "--output: the folder /dev/null cannot"),
        (["bench", "MODEL", "--results-dir", "/dev/null"], "--results-dir: the folder /dev/null cannot"),
        (["profile", "MODEL", "--output", "/dev/null/x.json"], "--output: the folder /dev/null cannot"),
        (["bench", "MODEL", "--system", "swiftllm", "--prompt-file", "/nowhere.txt", *SMALL], "/nowhere.txt"),
        (["bench", "MODEL", "--system", "swiftllm", "--input-len", "600", *SMALL], "max_model_len=512"),
        (
            ["generate", "MODEL", "hi", "--strategy", "asynchronous-overlap", "--disable-asynchronous-overlap", *SMALL],
            "forced and disabled at once",
        ),
    ],
)
def test_bad_input_ends_as_one_line(capsys, model, arguments, part):
    assert part in fails(capsys, *[model if word == "MODEL" else word for word in arguments])


def test_profile_of_something_else_is_refused(capsys, model, tmp_path):
    path = tmp_path / "table.json"
    assert main(["profile", model, "--output", str(path), *SMALL]) == 0
    capsys.readouterr()
    message = fails(capsys, "generate", model, "hi", "--profile", str(path), *SMALL, "--block-size", "8")
    assert "block_size" in message and "apex profile" in message
    assert main(["generate", model, "hi", "--profile", str(path), *SMALL]) == 0


def test_no_prompt_at_all_is_said(capsys, model, monkeypatch):
    monkeypatch.setattr(sys, "stdin", standard_input("\n  \n"))
    assert "no prompt" in fails(capsys, "generate", model, *SMALL)


def test_model_without_tokenizer_is_said(capsys, model, tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(Path(model) / name, tmp_path / name)
    assert "no tokenizer" in fails(capsys, "generate", str(tmp_path), "hi", "--system", "swiftllm", *SMALL)


def test_missing_kernels_are_said(model):
    (message,) = error_without("pacpu", "generate", model, "hi").splitlines()
    assert message.startswith("apex: ") and "pacpu" in message and "make setup" in message


def test_a_defect_keeps_its_traceback(model, monkeypatch):
    def broken(self):
        raise ValueError("a defect")

    monkeypatch.setattr(Engine, "step", broken)
    with pytest.raises(ValueError, match="a defect"):
        main(["generate", model, "hi", "--system", "swiftllm", *SMALL])


def test_interrupt_ends_quietly(capsys, model, monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "step", interrupted)
    assert main(["generate", model, "hi", "--system", "swiftllm", *SMALL]) == 130
    *start, end = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in start] == ["GPU tier", "CPU tier", "GPU batch", "CPU attention"]
    assert end == "apex: interrupted"


def expected_texts(model: str, prompts: list[str], **sampling) -> list[str]:
    from swiftllm import LLM

    llm = LLM(model, num_gpu_blocks=64, num_cpu_blocks=8, dtype="float32")
    try:
        return [output.text for output in llm.generate(prompts, SamplingParams(**sampling))]
    finally:
        llm.close()


@pytest.mark.parametrize("system", get_args(SystemName))
def test_generate_prints_what_the_model_says(capsys, model, system):
    assert main(["generate", model, "Once upon", "--max-tokens", "9", "--system", system, *SMALL]) == 0
    out, err = capsys.readouterr()
    assert out == expected_texts(model, ["Once upon"], max_tokens=9)[0] + "\n"
    assert "9 tokens in" in err


def test_generate_queues_prompts_whatever_the_targets(capsys, model, monkeypatch):
    prompts = [f"Once upon {number}" for number in range(12)]
    monkeypatch.setattr(sys, "stdin", standard_input("\n".join(prompts)))
    options = ["--max-tokens", "4", "--system", "omniserve", "--ttft-slo-s", "0.001", *SMALL]
    assert main(["generate", model, *options]) == 0
    out = capsys.readouterr().out
    assert [out.count(f">>> {prompt}\n") for prompt in prompts] == [1] * 12
    assert all(text in out for text in expected_texts(model, prompts, max_tokens=4))


def test_a_model_may_be_named_as_on_the_hub(capsys, model, monkeypatch):
    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: asked.append(name) or model)
    assert main(["generate", "some-org/some-model", "Once upon", "--max-tokens", "9", *SMALL]) == 0
    assert asked == ["some-org/some-model"]
    assert capsys.readouterr().out == expected_texts(model, ["Once upon"], max_tokens=9)[0] + "\n"


def test_generate_reads_lines_and_answers_in_their_order(capsys, model, monkeypatch):
    monkeypatch.setattr(sys, "stdin", standard_input("A first line\n\nand another\n"))
    assert main(["generate", model, "--max-tokens", "6", *SMALL]) == 0
    prompts = ["A first line", "and another"]
    first, second = expected_texts(model, prompts, max_tokens=6)
    assert capsys.readouterr().out == f">>> {prompts[0]}\n{first}\n\n>>> {prompts[1]}\n{second}\n"


def test_chat_puts_the_prompt_into_the_template(capsys, model):
    assert main(["generate", model, "hello", "--chat", "--max-tokens", "6", *SMALL]) == 0
    assert capsys.readouterr().out == expected_texts(model, ["<user>hello<assistant>"], max_tokens=6)[0] + "\n"


def test_bench_measures_each_system(capsys, model, tmp_path, monkeypatch):
    monkeypatch.setattr("swiftllm.runtime.cores.usable_cores", lambda: 2)
    path, results = tmp_path / "bench.json", tmp_path / "results"
    sizes = ["--num-requests", "5", "--input-len", "40", "--output-len", "6"]
    files = ["--output", str(path), "--results-dir", str(results)]
    assert main(["bench", model, "--system", "swiftllm", "apex", *sizes, *SMALL, *files]) == 0
    out, err = capsys.readouterr()
    assert "5 requests of 40 in / 6 out" in out and "8 GPU blocks (2 requests)" in out
    assert err.count("GPU batch: 1 thread (") == 2  # as large in both systems
    (folder,) = results.glob("bench/latest")
    kept = json.loads((folder / "summary.json").read_text())
    assert [record["ttft_s_p99"] > 0 and record["strategy_mix"] != "" for record in kept] == [True, True]
    assert json.loads((folder / "provenance.json").read_text())["configuration"]["engine"]["num_gpu_blocks"] == 8
    lines = gzip.decompress((folder / "records" / "apex.jsonl.gz").read_bytes()).splitlines()
    assert [len(json.loads(line)["token_times_s"]) for line in lines] == [6] * 5 and str(folder.resolve()) in out
    records = json.loads(path.read_text())
    assert [record["system"] for record in records] == ["swiftllm", "apex"]
    assert records[0]["gpu_batch_factor"] is None and 1 / 3 <= records[1]["gpu_batch_factor"] <= 3
    for record in records:
        assert record["completed"] == 5 and record["backend"] == "torch-cpu" and record["gpu"] is None
        assert record["output_tokens_per_s"] * record["makespan_s"] == pytest.approx(30)
        assert record["makespan_s"] <= record["wall_s"] < 1.1 * record["makespan_s"] + 0.1
        assert 0 < record["gpu_batch_busy_fraction"] <= 1 and 0 <= record["cpu_busy_fraction"] <= 1
        assert record["per_token_latency_s_mean"] <= record["wall_s"] / 6
    assert records[0]["strategy_mix"] == "gpu-only 100%" and records[0]["predicted_over_actual"] is None
    assert records[1]["predicted_over_actual"] > 0


def test_bench_measures_a_workload_at_several_rates(capsys, model, tmp_path):
    trace, path, results = tmp_path / "monday.json", tmp_path / "bench.json", tmp_path / "results"
    talks = [[{"value": "n" * (20 + i)}, {"value": "m" * (3 + i)}] for i in range(4)]
    trace.write_text(json.dumps([{"conversations": talk} for talk in talks]))
    flags = ["--workload", str(trace), "--num-requests", "4", "--request-rate", "50", "100", "--slo-ttft", "60"]
    files = ["--output", str(path), "--plot", str(tmp_path / "plot"), "--results-dir", str(results)]
    assert main(["bench", model, "--system", "swiftllm", "apex", *flags, *SMALL, *files]) == 0
    out = capsys.readouterr().out
    assert "4 requests of monday, 22 in / 4 out on average, 50, 100 a second" in out
    assert "\nMEASURED  " in out and all(title in out for title, _, _ in SERVICE_COLUMNS)
    records = json.loads(path.read_text())
    runs = [
        ("50 a second", "swiftllm"),
        ("50 a second", "apex"),
        ("100 a second", "swiftllm"),
        ("100 a second", "apex"),
    ]
    assert [(record["load"], record["system"]) for record in records] == runs
    for record in records:
        assert record["completed"] == 4 and record["output_tokens"] == 3 + 4 + 5 + 6 and record["ttft_target_s"] == 60
        assert record["trace_note"].startswith("4 requests of the file monday.json; tokens counted by the tokenizer of")
    rows = (tmp_path / "plot" / "service.csv").read_text().splitlines()
    assert len(rows) == 5 and all(row.startswith("MEASURED,") for row in rows[1:])
    kept = {file.name for file in (results / "bench" / "latest" / "records").iterdir()}
    assert {"apex-50-a-second.jsonl.gz", "swiftllm-100-a-second.jsonl.gz"} <= kept and len(kept) == 4


def test_bench_measures_two_classes(capsys, model, tmp_path):
    path, sizes = tmp_path / "bench.json", ["--num-requests", "2", "--input-len", "9", "--output-len", "5"]
    rest = ["--best-effort-requests", "3", "--best-effort-input-len", "12", "--ttft-slo-s", "60", "--tpot-slo-s", "30"]
    assert main(["bench", model, "--system", "omniserve", *sizes, *rest, *SMALL, "--output", str(path)]) == 0
    assert "2 requests of 9 in / 5 out, 3 best-effort ones of 12 in / 5 out" in capsys.readouterr().out
    (record,) = json.loads(path.read_text())
    assert record["service_class"] == "both" and (record["ttft_slo_s"], record["tpot_slo_s"]) == (60, 30)
    assert (record["latency_sensitive_completed"], record["best_effort_completed"]) == (2, 3)
    assert record["slo_attainment"] is None or record["slo_attainment"] == 1.0  # None: it took less than the target
    assert record["best_effort_tokens_per_s"] == pytest.approx(15 / record["wall_s"])


def test_bench_takes_prompts_from_a_text(capsys, model, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("abc")
    sizes = ["--num-requests", "3", "--input-len", "5", "--output-len", "2", "--system", "swiftllm", *SMALL]
    assert main(["bench", model, "--prompt-file", str(path), *sizes]) == 0
    capsys.readouterr()
    path.write_text("ab")
    assert "2 tokens: too few for 3 prompts" in fails(capsys, "bench", model, "--prompt-file", str(path), *sizes)


def test_bench_says_which_predictions_were_corrected():
    held = {"system": "apex", "gpu_batch_factor": 1.0, "cpu_attention_factor": 1.0}
    assert correction_line(held) == correction_line(dict.fromkeys(held)) == ""
    line = correction_line(held | {"cpu_attention_factor": 1.257})
    assert line == "apex: times of the profile corrected, GPU batch x 1.00, CPU attention x 1.26"


def test_bench_ratios_are_to_the_first_system():
    record = {"per_token_latency_s_mean": 0.1, "gpu_batch_busy_fraction": 1.0,
        "cpu_busy_fraction": 0.0, "preemptions": 0,
              "predicted_over_actual": None, "strategy_mix": "-"}  # fmt: skip
    table = figures_table(
        [
            {**record, "system": "neo", "output_tokens_per_s": 20.0},
            {**record, "system": "apex", "output_tokens_per_s": 50.0},
        ]
    )
    assert table.columns[2].header == "/neo" and list(table.columns[2].cells) == ["1.00", "2.50"]


def test_profile_measures_anew_and_writes_where_engines_look(capsys, model, cache):
    flags = [*SMALL, "--max-model-len", "64", "--cpu-threads", "2"]
    before = set((cache / "profiles").glob("*.json"))
    assert main(["profile", model, *flags]) == 0
    (path,) = set((cache / "profiles").glob("*.json")) - before
    out = capsys.readouterr().out
    assert "N_G / N_C" in out and str(path) in out
    path.write_text(json.dumps({**json.loads(path.read_text()), "linear": "spoilt"}))
    assert main(["profile", model, *flags]) == 0
    assert json.loads(path.read_text())["linear"] != "spoilt"
    capsys.readouterr()
    assert main(["generate", model, "hi", *flags]) == 0
    assert "profiling" not in capsys.readouterr().err


def test_key_figures_are_those_of_the_table():
    line = Curve((1, 128), (1e-3, 1.127e-2))
    gpu = Surface((1, 4), (Curve((100, 200), (1e-3, 2e-3)), Curve((100, 200), (1e-3, 2e-3))))
    cpu = Surface((1, 4), (Curve((100, 200), (1e-2, 2e-2)), Curve((100, 200), (4e-2, 8e-2))))
    assert attention_rate(gpu) == pytest.approx(400e3)
    assert attention_rate(Surface((1, 2), (Curve((1, 2), (0.0, 0.0)),) * 2)) is None
    table = key_figures(ProfileTable({}, line, line, line, gpu, gpu, cpu), num_layers=3, bytes_per_token=1000.0)
    figures = dict(zip(table.columns[0].cells, table.columns[1].cells, strict=True))
    assert figures["linear layers, 1 token"] == "1.00"
    assert figures["linear layers, 128 tokens"] == "11.27"
    assert figures["GPU attention rate N_G"] == "0.40 M"
    assert figures["CPU attention rate N_C"] == "0.01 M"
    assert figures["  which reads"] == "0.01"
    assert figures["N_G / N_C"] == "40.00"


def test_a_verb_of_another_package_is_found_by_name_or_said_to_be_missing(capsys, monkeypatch):
    with pytest.raises(SystemExit) as raised:
        main(["validate", "--help"])
    assert raised.value.code == 0
    assert "apex validate" in capsys.readouterr().out
    assert main(["validate", "--config", "/nowhere.yaml"]) == 2
    assert "/nowhere.yaml: No such file" in capsys.readouterr().err
    monkeypatch.setitem(OPTIONAL_VERBS, "validate", ("no_such_package.validate", ""))
    assert main(["validate"]) == 2
    assert "no_such_package" in capsys.readouterr().err
