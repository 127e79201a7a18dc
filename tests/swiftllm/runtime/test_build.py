"""Engines whose start fails."""

from __future__ import annotations

import pytest

from swiftllm.config import EngineConfig
from swiftllm.runtime import build
from swiftllm.runtime.torch_backend import TorchBackend


@pytest.mark.parametrize("at", ["make_scheduler", "make_kv_manager", "assemble_engine"])
def test_a_start_that_fails_closes_the_backend(at: str, tiny_model_dir, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise KeyboardInterrupt

    closed: list[TorchBackend] = []
    close = TorchBackend.close
    monkeypatch.setattr(TorchBackend, "close", lambda self: (closed.append(self), close(self))[1])
    if at != "make_scheduler":
        monkeypatch.setattr(build, at, fails)
    config = EngineConfig(str(tiny_model_dir()), device="cpu", dtype="float32", num_gpu_blocks=4, num_cpu_blocks=0)
    with pytest.raises(KeyboardInterrupt):
        build.build_gpu_only("swiftllm", fails if at == "make_scheduler" else lambda *_: None, config)
    assert len(closed) == 1
