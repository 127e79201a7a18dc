"""Kernels are compiled and loaded at their first launch: before a capture, which does not allow it, and before serving,
which would stand still meanwhile."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import Qwen2Config

from swiftllm.config import EngineConfig
from swiftllm.core.request import SamplingParams, Tier
from swiftllm.runtime.torch_backend import open_torch_backend
from tests.reference.backend_driver import BackendDriver
from tests.reference.fake_gpu import OWN_CARD, FakeOps, fake_gpu
from tests.reference.fake_streams import DEVICE, FakeWorker, Hazard


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
    """Prompts in chunks into both tiers, decodes in the lane and in cohorts that ride and step, swaps both ways."""
    model_dir = tiny_model_dir(num_hidden_layers=2, **model)
    pools = {"num_gpu_blocks": 20, "num_cpu_blocks": 20, "cpu_kv_dtype": kept}
    config = EngineConfig(str(model_dir), dtype="float32", max_num_seqs=6, **pools)
    how = SamplingParams(max_tokens=4, ignore_eos=True, temperature=1.0, top_p=0.9, seed=0)
    with fake_gpu(0, can_capture=can_capture) as cuda:
        driver = BackendDriver(open_torch_backend(config, partial(FakeWorker, cuda)))
        at_start = list(cuda.kernels.compiled)
        requests = [driver.admit(f"r{i}", [3 + i] * (9 + 5 * i), list(Tier)[i % 2], how) for i in range(4)]
        driver.prefill(requests, 11)
        driver.decode(requests)
        driver.decode([request for request in requests if request.tier is Tier.CPU])
        driver.move(requests)
        driver.decode(requests)
    assert cuda.kernels.compiled[len(at_start) :] == [] and {"silu_and_mul_kernel", "draw_kernel"} <= {*at_start}
    assert (kept == "int8") == ("dequantise_blocks_kernel" in at_start)
