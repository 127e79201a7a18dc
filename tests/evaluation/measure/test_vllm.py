"""How vLLM is started: the command and the folder, and the real CPU build where it is installed."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re

import pytest
from tokenizers import Tokenizer

from apex.workloads.catalogue import Origin, TraceRow
from apex.workloads.requests import Lengths, PromptTokens, WorkloadSpec, make_workload
from evaluation.measure import vllm
from evaluation.measure.http import replay_workload
from evaluation.measure.server import launched_server
from evaluation.measure.vllm import (
    how_to_install,
    servable_folder,
    vllm_command,
    vllm_path,
    vllm_program,
)

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500,
    "max_position_embeddings": 512, "eos_token_id": 2, "bos_token_id": 1, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "torch_dtype": "float16",
}  # fmt: skip
REAL_PROGRAM = vllm_program("cpu")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("APEX_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path):
    """A model that is a config.json only."""
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def flags_of(command) -> dict[str, str]:
    """Each flag of a command with what follows it."""
    return {name: value for name, value in itertools.pairwise(command.arguments) if name.startswith("--")}


def paper_command(model, device_type, **changes):
    limits = {"block_size": 16, "num_gpu_blocks": 54, "max_model_len": 832, "max_num_batched_tokens": 832,
              "max_num_seqs": 1024, "dtype": "float16", "dummy_weights": True, "cores": (3, 5)}  # fmt: skip
    return vllm_command(vllm_path(device_type), model, device_type=device_type, **{**limits, **changes})


def test_a_gpu_server_has_the_blocks_and_limits_of_the_setting(cache, model):
    command = paper_command(model, "cuda")
    assert command.arguments[:2] == (str(cache / "vllm-gpu" / "bin" / "vllm"), "serve")
    flags = flags_of(command)
    assert flags["--dtype"] == "float16" and flags["--load-format"] == "dummy" and flags["--max-model-len"] == "832"
    assert flags["--block-size"] == "16" and flags["--max-num-batched-tokens"] == "832"
    assert flags["--num-gpu-blocks-override"] == "55"  # one of them is vLLM's own
    token_bytes = 2 * CONFIG["num_hidden_layers"] * CONFIG["num_key_value_heads"] * 64 * 2
    assert int(flags["--kv-cache-memory-bytes"]) == 55 * 16 * token_bytes
    assert flags["--max-num-seqs"] == "54"  # vLLM refuses more requests than tokens; no more than 54 ever run
    assert "--no-enable-prefix-caching" in command.arguments
    assert command.environment["HF_HUB_OFFLINE"] == command.environment["VLLM_NO_USAGE_STATS"] == "1"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in command.environment and command.cores == (3, 5)


def test_vllm_takes_no_more_requests_than_tokens(cache, model):
    command = paper_command(model, "cuda", num_gpu_blocks=2000, max_num_batched_tokens=512)
    assert flags_of(command)["--max-num-seqs"] == "512"


def test_the_cpu_build_has_as_many_tokens_in_larger_blocks(cache, model):
    command = paper_command(model, "cpu")
    flags = flags_of(command)
    assert flags["--block-size"] == "32" and flags["--num-gpu-blocks-override"] == str(54 // 2 + 1)
    assert command.environment["VLLM_CPU_OMP_THREADS_BIND"] == "3,5"
    odd = flags_of(paper_command(model, "cpu", num_gpu_blocks=55))
    assert odd["--num-gpu-blocks-override"] == str(28 + 1)
    as_asked = flags_of(paper_command(model, "cpu", block_size=64))
    assert as_asked["--block-size"] == "64" and as_asked["--num-gpu-blocks-override"] == "55"


def test_what_is_not_given_is_left_to_vllm(cache, model):
    command = vllm_command(
        vllm_path("cpu"), model, device_type="cpu", dtype="bfloat16", max_model_len=64, threads="auto"
    )
    assert command.arguments[3:] == (
        "--dtype", "bfloat16", "--max-model-len", "64", "--no-enable-prefix-caching", "--disable-uvicorn-access-log"
    )  # fmt: skip
    assert command.environment["VLLM_CPU_OMP_THREADS_BIND"] == "auto"
    assert command.cores == tuple(sorted(os.sched_getaffinity(0)))


def test_blocks_without_a_size_are_refused(cache, model):
    with pytest.raises(ValueError, match="needs a block_size"):
        paper_command(model, "cuda", block_size=None)


def test_every_token_id_of_a_bare_model_becomes_text(cache, model):
    folder = servable_folder(model)
    assert folder.name == "tiny-llama" and cache in folder.parents
    assert json.loads((folder / "config.json").read_text()) == CONFIG
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [tokenizer.decode([token]) for token in range(CONFIG["vocab_size"])]
    assert all(texts) and len(set(texts)) == CONFIG["vocab_size"]
    assert tokenizer.encode("t7 t499").ids == [7, 499]
    assert servable_folder(model) == folder


def test_another_config_gets_another_folder(cache, model):
    first = servable_folder(model)
    (model / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 3}))
    second = servable_folder(model)
    assert second != first and json.loads((second / "config.json").read_text())["num_hidden_layers"] == 3


def test_a_checkpoint_is_served_as_it_is(cache, model):
    (model / "tokenizer.json").write_text("{}")
    assert servable_folder(model) == model and not cache.exists()


def test_a_folder_without_a_model_is_refused(cache, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        servable_folder(tmp_path)


@pytest.mark.parametrize(("device_type", "build"), [("cuda", "gpu"), ("cpu", "cpu")])
def test_the_program_is_found_once_it_is_installed(cache, device_type, build):
    assert vllm_program(device_type) is None and how_to_install(device_type) == f"scripts/install_vllm.sh --{build}"
    program = cache / f"vllm-{build}" / "bin" / "vllm"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert vllm_program(device_type) == program


@pytest.mark.skipif(
    REAL_PROGRAM is None or not os.environ.get("APEX_TEST_VLLM"),
    reason=f"runs with APEX_TEST_VLLM=1 where vLLM is installed: {how_to_install('cpu')}",
)
def test_the_real_cpu_build_serves_a_bare_model_with_the_blocks_asked_for(cache, model, tmp_path):
    """About 30 s: 54 blocks of 16 tokens, requests of forced lengths, one of them as long as is allowed."""
    command = vllm_command(
        REAL_PROGRAM, model, device_type="cpu", dtype="bfloat16", block_size=16, num_gpu_blocks=54, max_model_len=512,
        max_num_batched_tokens=256, max_num_seqs=1024, dummy_weights=True,
    )  # fmt: skip
    without_compiling = {**command.environment, "VLLM_CPU_CI_ENV": "1"}
    command = dataclasses.replace(command, environment=without_compiling)
    log = tmp_path / "vllm.log"
    with launched_server(command, log, 300.0) as running:
        assert running.server.max_model_len == 512 and running.server.version
        rows = (TraceRow(480, 32, 0.0), TraceRow(1, 20, 0.0), TraceRow(40, 1, 0.0))
        lengths = Lengths(WorkloadSpec("x", len(rows)), "X", Origin("fitted", "for tests"), rows)
        workload = make_workload(lengths, PromptTokens(CONFIG["vocab_size"]))
        records = replay_workload(running.server, workload, ended=running.ended).records
    assert [(record.failure, len(record.token_times_s)) for record in records] == [(None, 32), (None, 20), (None, 1)]
    tokens = re.search(r"KV cache size: ([\d,]+) tokens", log.read_text())
    assert int(tokens[1].replace(",", "")) == 54 * 16 + vllm.RESERVED_BLOCKS * vllm.CPU_BLOCK_SIZE
