"""Engine configuration: frozen values. The CLI shows the text below each field as its help."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

DeviceName = Literal["auto", "cpu", "cuda"]
DtypeName = Literal["auto", "float32", "float16", "bfloat16"]
LoadFormat = Literal["auto", "dummy"]
CacheTiers = Literal["auto", "gpu", "both"]
CpuKVDtype = Literal["auto", "int8"]


def check_at_least(least: int, options: object, *names: str) -> None:
    """Check that none of these fields is a number below ``least``, 0 or 1; None passes."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"{name}={value} must {f'be at least {least}' if least else 'not be negative'}")


@dataclass(frozen=True)
class EngineConfig:
    """The model, its device and dtype, and the engine's memory and thread limits."""

    model: str
    """Hugging Face folder of a Llama-family model (config.json, *.safetensors, tokenizer.json). A name on the hub has a
    folder from :func:`swiftllm.model.folder.model_folder`."""
    device: DeviceName = "auto"
    """Where the linear layers run; auto takes CUDA if torch finds a GPU."""
    dtype: DtypeName = "auto"
    """Weights, activations and KV cache; auto is the checkpoint's on CUDA (float16 below sm_80), on a CPU
    the type it computes fastest."""
    load_format: LoadFormat = "auto"
    """auto reads safetensors; dummy fills the shapes of config.json with small random weights."""
    block_size: int = 16
    """Tokens per KV-cache block, in both tiers."""
    num_gpu_blocks: int | None = None
    """KV blocks of the GPU tier; by default as many as free memory allows."""
    num_cpu_blocks: int | None = None
    """KV blocks of the CPU tier; by default as many as free host memory allows."""
    cpu_kv_dtype: CpuKVDtype = "auto"
    """K and V in the CPU tier: auto keeps the dtype; int8, a scale per token and head, is not exact and takes about
    half of a 16-bit type's bytes. It needs a block_size that 16 divides and the kernel native."""
    enable_prefix_caching: bool = True
    """Keep the K and V of full blocks, as long as there is room, for later requests that begin with the same tokens.
    Where layers have attention windows, blocks are overwritten and none is kept."""
    prefix_cache_tiers: CacheTiers = "auto"
    """Tiers where prefixes are cached. auto: both; the GPU tier alone in vllm; none in the papers' baselines (swiftllm,
    neo, fastdecode, sarathi, llumnix). With both, a GPU-only system copies prefixes back from the CPU tier."""
    max_num_batched_tokens: int = 512
    """Maximum number of tokens in the GPU batch in one iteration; longer prompts are prefilled in chunks."""
    max_num_seqs: int = 256
    """Maximum number of requests that hold KV cache at once, in both tiers together."""
    max_model_len: int | None = None
    """Maximum number of tokens of a request, prompt and output; by default the model's own."""
    gpu_batch_threads: int | None = None
    """Without a GPU: threads of the GPU batch; by default all cores if GPU-only, else the fastest, measured once."""
    cpu_threads: int | None = None
    """Threads of the CPU attention worker; by default the cores that the GPU batch leaves, or all if it leaves none.
    Beside a GPU the fastest number, measured once: at most all hardware threads but one, in a server all but two."""
    cpu_kernel: str | None = None
    """CPU attention kernel: native, ispc or llamafile; by default the best for this machine and dtype."""
    tensor_parallel: int = 1
    """Processes (ranks) that divide heads, FFN and vocabulary: one for each GPU; without a GPU they share the cores."""
    seed: int = 0
    """Seed of dummy weights, and of requests without their own sampling seed."""
    weights_gpu_memory: float | Literal["auto"] | None = None
    """GiB of GPU memory for weights; what exceeds it is streamed over PCIe in every iteration or computed by the CPU,
    by times measured at the start. auto: as many as give the highest predicted throughput; all if they leave room for
    the KV cache of all requests. By default all weights must fit."""
    attention_hosts: str | None = None
    """Other hosts that hold a part of the CPU tier and compute its attention: HOST:PORT, more of them with commas, of
    `apex attention-host`; with ray_address their number."""
    ray_address: str | None = None
    """Address of a Ray cluster, whose nodes the attention_hosts are placed on; auto for the one this machine is in."""
    synchronous: bool = False
    """Run CPU attention inline on the main thread, without overlap; the tokens must not change."""

    def __post_init__(self) -> None:
        for name, choices in (
            ("device", DeviceName),
            ("dtype", DtypeName),
            ("load_format", LoadFormat),
            ("prefix_cache_tiers", CacheTiers),
            ("cpu_kv_dtype", CpuKVDtype),
        ):
            if getattr(self, name) not in get_args(choices):
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(get_args(choices))}")
        if self.ray_address is not None and not (self.attention_hosts or "").isdigit():
            raise ValueError(f"ray_address={self.ray_address!r} needs attention_hosts, the number to place there")
        if self.attention_hosts is not None and self.tensor_parallel != 1:
            raise ValueError("attention_hosts and tensor_parallel do not work together: drop one of them")
        if self.cpu_kv_dtype == "int8":
            if self.block_size % 16:
                raise ValueError(f"cpu_kv_dtype=int8 needs a block_size that 16 divides, not {self.block_size}")
            if self.cpu_kernel not in (None, "native"):
                raise ValueError(f"cpu_kv_dtype=int8 needs the cpu_kernel native, not {self.cpu_kernel}")
        if self.ray_address is None and (self.attention_hosts or "").isdigit():
            raise ValueError(
                f"attention_hosts={self.attention_hosts} is a number of hosts, which needs a ray_address; without Ray "
                "name the hosts, such as 10.0.0.7:7300"
            )
        if self.weights_gpu_memory is not None:
            given = self.weights_gpu_memory
            if given != "auto" and (isinstance(given, str) or not 0.0 <= given < float("inf")):
                raise ValueError(f"weights_gpu_memory={given} must be a number of GiB from 0 on, or auto")
            if self.tensor_parallel != 1:
                raise ValueError("weights_gpu_memory and tensor_parallel do not work together: drop one of them")
        for item in fields(self):
            if item.type in ("int", "int | None") and not isinstance(getattr(self, item.name), int | None):
                raise ValueError(f"{item.name}={getattr(self, item.name)!r} must be a whole number")
        check_at_least(1, self, "block_size", "max_num_batched_tokens", "max_num_seqs", "tensor_parallel")
        check_at_least(0, self, "num_gpu_blocks", "num_cpu_blocks")
        check_at_least(1, self, "gpu_batch_threads", "cpu_threads")
        check_at_least(3, self, "max_model_len")  # the profiler times chunks of two lengths, with and without a past
