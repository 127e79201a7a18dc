"""Engines whose start fails, and engines where `apex` is not installed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import closing

import pytest

from swiftllm import build
from swiftllm.build import build_engine
from swiftllm.config import EngineConfig
from swiftllm.runtime.torch_backend import TorchBackend
from swiftllm.systems import System
from tests.reference.tiny_tokenizer import make_tiny_tokenizer

WITHOUT_APEX = """
import sys
import swiftllm.systems
swiftllm.systems.PLUGINS = ()
from swiftllm import LLM, SamplingParams
with LLM(sys.argv[1], system="vllm", device="cpu", num_gpu_blocks=8, num_cpu_blocks=0) as llm:
    print(len(llm.generate([[3, 4, 5]], SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids))
try:
    LLM(sys.argv[1], device="cpu", weights_gpu_memory=1.0)
except ValueError as error:
    print(error)
print([name for name in sys.modules if name.split(".")[0] == "apex"])
"""

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import swiftllm, apex, apex.cli, apex.build, swiftllm.llm, swiftllm.build
from swiftllm.runtime.execution_context import why_no_triton
print([name for name in sys.modules if name.startswith(("swiftllm.parallel", "ray"))])
print(why_no_triton(90))
"""


@pytest.mark.parametrize("at", ["scheduler", "this_machine", "build"])
def test_a_start_that_fails_closes_the_backend(at: str, tiny_model_dir, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    closed: list[TorchBackend] = []
    close = TorchBackend.close
    monkeypatch.setattr(TorchBackend, "close", lambda self: (closed.append(self), close(self))[1])
    if at != "scheduler":
        monkeypatch.setattr(build, at, fails)
    config = EngineConfig(str(tiny_model_dir()), device="cpu", dtype="float32", num_gpu_blocks=4, num_cpu_blocks=0)
    with pytest.raises(KeyboardInterrupt):
        build.build_gpu_only(System("some", "a system", fails), config)
    assert len(closed) == 1


def test_the_tokenizers_end_token_ends_outputs_too(tmp_path, tiny_model_dir) -> None:
    """As in vLLM, whatever config.json and generation_config.json name, or do not."""
    folder = make_tiny_tokenizer(shutil.copytree(tiny_model_dir(), tmp_path / "model"))
    config = EngineConfig(str(folder), device="cpu", dtype="float32", num_gpu_blocks=4, num_cpu_blocks=0)
    raw = json.loads((folder / "config.json").read_text())
    for own, generation, expected in ((None, None, {2}), (5, [], {2, 5}), (5, [6], {2, 5, 6})):
        (folder / "config.json").write_text(json.dumps(raw | {"eos_token_id": own}))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
        with closing(build_engine("vllm", config)) as engine:
            assert engine.eos_token_ids == expected


def test_systems_that_use_the_gpu_only_need_no_apex(tiny_model_dir) -> None:
    command = [sys.executable, "-c", WITHOUT_APEX, str(tiny_model_dir())]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    refusal = "weights_gpu_memory needs the package apex, which places weights: install it or drop it"
    assert answer.stdout.splitlines() == ["4", refusal, "[]"], answer.stderr


def test_an_engine_of_one_process_loads_without_triton_and_nothing_of_several_ranks() -> None:
    answer = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, check=True)
    loaded, reason = answer.stdout.splitlines()
    assert loaded == "[]" and "pip install triton" in reason
