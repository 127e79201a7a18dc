"""Kernels are compiled and loaded at their first launch: before a capture, which does not allow it, and before serving,
which would stand still meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from quantise import write_folder
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config

from swiftllm.config import EngineConfig
from swiftllm.core.request import SamplingParams, Tier
from swiftllm.runtime import graphs
from swiftllm.runtime.torch_backend import open_torch_backend
from tests.reference.backend_driver import BackendDriver
from tests.reference.fake_gpu import OWN_CARD, FakeOps, fake_gpu
from tests.reference.fake_kernels import CAPABILITY
from tests.reference.fake_streams import DEVICE, FakeWorker, Hazard
from tests.reference.tiny_experts import QWEN3_MOE
from tests.reference.tiny_gpt_oss import make_folders
from tests.reference.tiny_linear import make_tiny_linear
from tests.reference.wide_residuals import make_wide


def test_a_kernel_first_launched_in_a_capture_is_seen():
    with fake_gpu(0) as cuda:
        torch.cuda.set_device(OWN_CARD)
        ops, stream = FakeOps(cuda), torch.cuda.Stream()
        rows, more = (torch.zeros(2, size, dtype=torch.float32, device=DEVICE) for size in (64, 96))
        ops.silu_and_mul(rows)
        with torch.cuda.stream(stream):
            cuda.capturing = True
            ops.silu_and_mul(rows)
            with pytest.raises(Hazard, match="launches silu_and_mul_kernel for the first time"):
                ops.silu_and_mul(more)
            cuda.capturing = False


WINDOWS = {"kind": Qwen2Config, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("model", "can_capture", "kept"),
    [({}, True, "int8"), ({}, False, "auto"), ({}, True, "auto"), (WINDOWS, True, "auto"), (WINDOWS, False, "int8")],
    ids=["int8", "eager", "graphs", "windows", "windows, eager, int8"],
)
def test_no_kernel_is_compiled_while_requests_wait_for_it(tiny_model_dir, model, can_capture, kept):
    model_dir = tiny_model_dir(num_hidden_layers=2, **model)
    at_start = kernels_of_the_start(model_dir, can_capture, cpu_kv_dtype=kept, dtype="float32")
    assert (kept == "int8") == ("dequantise_blocks_kernel" in at_start)


@pytest.mark.parametrize("can_capture", [False, True], ids=["eager", "graphs"])
def test_nor_are_those_of_residuals_in_float32(tmp_path, can_capture):
    kernels_of_the_start(make_wide(tmp_path, scale=1.0), can_capture, capability=75, dtype="float16")


@pytest.mark.parametrize("can_capture", [False, True], ids=["eager", "graphs"])
def test_nor_are_those_of_linear_attention(tmp_path, can_capture):
    at_start = kernels_of_the_start(make_tiny_linear(tmp_path, "Qwen3_5"), can_capture, dtype="float16")
    assert {"convolve_kernel", "delta_rule_kernel", "norm_and_gate_kernel"} <= {*at_start}


def kernels_of_the_start(model_dir, can_capture: bool, capability: int = CAPABILITY, **options) -> list[str]:
    """Prompts in chunks into both tiers, decodes in the GPU batch and in CPU batches that join and step, swaps both
    ways."""
    config = EngineConfig(str(model_dir), max_num_seqs=6, num_gpu_blocks=20, num_cpu_blocks=20, **options)
    how = SamplingParams(max_tokens=4, ignore_eos=True, temperature=1.0, top_p=0.9, seed=0)
    with fake_gpu(0, can_capture=can_capture, capability=capability) as cuda:
        driver = BackendDriver(open_torch_backend(config, partial(FakeWorker, cuda)))
        at_start = list(cuda.kernels.compiled)
        if driver.backend.model.states is not None:
            driver.backend.state_slots = {f"r{i}": i for i in range(4)}
        requests = [driver.admit(f"r{i}", [3 + i] * (9 + 5 * i), list(Tier)[i % 2], how) for i in range(4)]
        driver.prefill(requests, 11)
        driver.decode(requests)
        driver.decode([request for request in requests if request.tier is Tier.CPU])
        driver.move(requests)
        driver.decode(requests)
    assert cuda.kernels.compiled[len(at_start) :] == [] and {"silu_and_mul_kernel", "draw_kernel"} <= {*at_start}
    return at_start


# -- layers that differ: each matrix has kernels of its own ------------------------------------------------------------

LAYERS = range(4)


def make_mixed(layout: str, quantised: set[int], make_plain: Callable[..., Path], target: Path) -> Path:
    """A model of which these layers alone are quantised, as a checkpoint's list of modules says."""
    source = make_plain(num_hidden_layers=len(LAYERS))
    write_folder(source, target, layout, 32)
    packed, plain = load_file(target / "model.safetensors"), load_file(source / "model.safetensors")
    for layer in set(LAYERS) - quantised:
        of_layer = f"model.layers.{layer}."
        packed = {name: tensor for name, tensor in packed.items() if not name.startswith(of_layer)}
        packed |= {name: tensor for name, tensor in plain.items() if name.startswith(of_layer)}
    save_file(packed, target / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((target / "config.json").read_text())
    left_out = [f"model.layers.{layer}" for layer in set(LAYERS) - quantised]
    raw["quantization_config"] |= (
        {"ignore": ["lm_head", *left_out]} if layout == "compressed-tensors" else {"modules_to_not_convert": left_out}
    )
    (target / "config.json").write_text(json.dumps(raw))
    return target


@pytest.fixture
def few_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of codes have tiles of 16, 32 and 64 rows."""
    monkeypatch.setattr(graphs, "ROW_BUCKETS", (2, 32, 64))


def capture_all(folder: Path, dtype: str = "float16") -> list[str]:
    """Start an engine on a GPU, where a first launch inside a capture is an error. Returns the kernels compiled."""
    pools = {"num_gpu_blocks": 20, "num_cpu_blocks": 0}
    config = EngineConfig(
        str(folder), dtype=dtype, max_num_seqs=64, max_num_batched_tokens=64, max_model_len=64, **pools
    )
    with fake_gpu(0) as cuda:
        backend = open_torch_backend(config, partial(FakeWorker, cuda))
        assert len(backend.graphs)
        return cuda.kernels.compiled


@pytest.mark.parametrize(
    ("layout", "quantised", "dtype"),
    [
        ("awq", {2}, "float16"),
        ("awq", {0, 1, 3}, "float16"),
        ("gptq", {2}, "float32"),
        ("gptq", {1, 2}, "float16"),
        ("compressed-tensors", {2}, "float16"),
        ("compressed-tensors", {0, 1, 3}, "float32"),
    ],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_layers_that_are_quantised_and_others_are_both_captured(
    tiny_model_dir, tmp_path, few_buckets, layout, quantised, dtype
):
    compiled = capture_all(make_mixed(layout, quantised, tiny_model_dir, tmp_path / "mixed"), dtype)
    assert "quantised_linear_kernel" in compiled


@pytest.mark.parametrize(("name", "dtype"), [("plain", "float16"), ("packed", "float16"), ("packed", "float32")])
def test_experts_are_captured_of_16_bits_and_of_mxfp4(tmp_path, few_buckets, name, dtype):
    compiled = capture_all(make_folders(tmp_path)[name], dtype)
    assert ("expert_codes_kernel" in compiled) == (name == "packed")
    assert ("expert_product_kernel" in compiled) == (name == "plain")


def test_experts_without_sinks_and_windows_are_captured(tiny_model_dir, few_buckets):
    assert "expert_product_kernel" in capture_all(tiny_model_dir(num_hidden_layers=2, **QWEN3_MOE))
