"""Runs vLLM's own benchmark client, `vllm bench serve`, as an independent test of a server."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from evaluation.measure.server import Server

TIMEOUT_S = 900.0


class BenchFailed(RuntimeError):
    """The client produced no result; the message holds the end of its output."""


def bench_serve(
    vllm: Path, server: Server, model: Path, num_requests: int, input_len: int, output_len: int, result: Path
) -> dict[str, Any]:
    """Send random prompts to ``server``, all at once, and wait for all answers.

    Args:
        vllm: the vllm command.
        model: folder of the served model; its tokenizer makes the prompts.
        input_len, output_len: tokens of each request.
        result: JSON file to which the client writes its figures.

    Returns:
        The client's figures, with the numbers of ``completed`` and ``failed`` requests among them.

    Raises:
        BenchFailed: the client ended with an error or took too long.
    """
    command = [
        str(vllm), "bench", "serve", "--backend", "openai", "--base-url", server.url, "--endpoint", "/v1/completions",
        "--model", server.model, "--tokenizer", str(model), "--dataset-name", "random", "--num-prompts",
        str(num_requests), "--random-input-len", str(input_len), "--random-output-len", str(output_len), "--ignore-eos",
        "--disable-tqdm", "--save-result", "--result-dir", str(result.parent), "--result-filename", result.name,
    ]  # fmt: skip
    result.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise BenchFailed(f"vllm bench serve took longer than {TIMEOUT_S:g} s") from None
    if done.returncode != 0 or not result.is_file():
        end = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise BenchFailed(f"vllm bench serve ended with status {done.returncode}:\n{end}")
    return json.loads(result.read_text())
