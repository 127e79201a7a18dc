"""Predicted machines for tests, and a card of one's own."""

from __future__ import annotations

from pathlib import Path

import yaml

from apex.perf.model import ProfileTable
from apex.simulator.hardware_files import load_gpu, load_host, load_model_config
from apex.simulator.predicted_profile import hardware_profile
from swiftllm.model.config import ModelConfig

GPUS = (
    "a10", "a100", "a30", "a40", "a6000", "h100", "h200", "rtx-3090", "rtx-4090", "rtx-a4000",
    "rtx-pro-6000", "t4", "v100",
)  # fmt: skip
HOSTS = (
    "dual-xeon-6130", "dual-xeon-6342", "g4dn-12xlarge", "g4dn-2xlarge", "g4dn-4xlarge", "g4dn-8xlarge", "g4dn-xlarge",
    "g5-12xlarge", "g5-16xlarge", "g5-2xlarge", "g5-4xlarge", "g5-8xlarge", "g5-xlarge", "hgx-numa-node",
    "ryzen-7950x", "xeon-6342",
)  # fmt: skip
LLAMA_2_7B, LLAMA_3_8B = load_model_config("llama-2-7b"), load_model_config("llama-3.1-8b")
MODELS = {"t4": LLAMA_2_7B, "a10": LLAMA_3_8B}


def profile(gpu: str, host: str = "dual-xeon-6342", model: ModelConfig | None = None, **options) -> ProfileTable:
    return hardware_profile(load_gpu(gpu), load_host(host), model or MODELS.get(gpu, LLAMA_2_7B), **options)


def write_gpu(path: Path, **changes) -> Path:
    fields = {"memory_gb": 96, "memory_bandwidth_gb_s": 1000, "tensor_tflops": 200, "pcie_gb_s": 31.5}
    fields |= {"compute_capability": 9.0} | changes
    figures = {
        name: {"value": value, "unit": "as named", "status": "published", "origin": "its data sheet"}
        for name, value in fields.items()
        if value is not None
    }
    path.write_text(yaml.safe_dump({"kind": "gpu", "name": "New card", "figures": figures}))
    return path
