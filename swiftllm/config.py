"""Engine configuration: frozen values, the help text beside each field (the CLI shows it)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

DeviceName = Literal["auto", "cpu", "cuda"]
DtypeName = Literal["auto", "float32", "float16", "bfloat16"]
LoadFormat = Literal["auto", "dummy"]

WHOLE_NUMBERS = (
    "block_size",
    "num_gpu_blocks",
    "num_cpu_blocks",
    "max_num_batched_tokens",
    "max_num_seqs",
    "max_model_len",
    "lane_threads",
    "cpu_threads",
    "seed",
)


@dataclass(frozen=True)
class EngineConfig:
    """What the engine runs and how much memory it may take."""

    model: str
    """Hugging Face folder of a Llama-family model (config.json, *.safetensors, tokenizer.json); for what the hub has,
    see :func:`swiftllm.model.hub.model_folder`."""
    device: DeviceName = "auto"
    """Where the linear layers run; auto takes CUDA when torch sees a GPU."""
    dtype: DtypeName = "auto"
    """Weights, activations and KV cache; auto is float16 on CUDA, and what the CPU computes fastest on CPU."""
    load_format: LoadFormat = "auto"
    """auto reads safetensors; dummy fills the shapes of config.json with small random weights."""
    block_size: int = 16
    """Tokens per KV-cache block, in both tiers."""
    num_gpu_blocks: int | None = None
    """KV blocks of the GPU tier; by default from the memory that is free."""
    num_cpu_blocks: int | None = None
    """KV blocks of the CPU tier; by default from the host memory that is free."""
    max_num_batched_tokens: int = 512
    """Tokens that cross the lane in one iteration at most; longer prompts prefill in chunks."""
    max_num_seqs: int = 256
    """Requests that hold KV cache at once at most, in both tiers together."""
    max_model_len: int | None = None
    """Prompt plus output tokens of one request at most; by default what the model was made for."""
    lane_threads: int | None = None
    """Threads of the lane (linear layers, GPU-tier attention) where a CPU computes it; by default one for every core
    in GPU-only systems, in the others as many as decode fastest on this machine, measured on the first start."""
    cpu_threads: int | None = None
    """Threads of the CPU attention worker; by default every core but the lane's, or all where the lane has them all."""
    cpu_kernel: str | None = None
    """CPU attention kernel: native, ispc or llamafile; by default the best for this machine and dtype."""
    seed: int = 0
    """Seed of dummy weights and of sampling without a seed of its own."""
    synchronous: bool = False
    """Run CPU attention inline on the main thread: the slow twin that shows whether overlap changes any token."""

    def __post_init__(self) -> None:
        for name, choices in (("device", DeviceName), ("dtype", DtypeName), ("load_format", LoadFormat)):
            if getattr(self, name) not in get_args(choices):
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(get_args(choices))}")
        for name in WHOLE_NUMBERS:
            if not isinstance(getattr(self, name), int | None):
                raise ValueError(f"{name}={getattr(self, name)!r} must be a whole number")
        for name in ("block_size", "max_num_batched_tokens", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("num_gpu_blocks", "num_cpu_blocks"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name}={value} must not be negative")
        for name in ("max_model_len", "lane_threads", "cpu_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
