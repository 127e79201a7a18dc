"""How vLLM is started for a measurement: its program, its command, and a folder that it can serve.

vLLM lives in environments of its own (scripts/install_vllm.sh): one build for NVIDIA GPUs, one for CPUs.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from apex.simulator.predicted_profile import ITEMSIZES
from evaluation.measure.server import ServerCommand
from swiftllm.files import cache_dir, write_atomically
from swiftllm.model.config import ModelConfig

INSTALL_SCRIPT = "scripts/install_vllm.sh"
BUILDS = {"cuda": "gpu", "cpu": "cpu"}
READY_TIMEOUT_S = 1200.0
"""vLLM loads and compiles the model and captures CUDA graphs before it is ready. This takes minutes."""
RESERVED_BLOCKS = 1  # vLLM's block pool keeps one block, the null block, that no request ever gets
CPU_BLOCK_SIZE = 32  # attention of the CPU build takes multiples of this only (vLLM 0.32)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # FlashInfer's sampler is compiled at the start by nvcc, which machines need not have. Greedy requests never use it.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


def vllm_path(device_type: str) -> Path:
    """Where the ``vllm`` command for "cuda" or "cpu" is, once it is installed."""
    return cache_dir() / f"vllm-{BUILDS[device_type]}" / "bin" / "vllm"


def vllm_program(device_type: str) -> Path | None:
    """The installed ``vllm`` command for "cuda" or "cpu", or None."""
    program = vllm_path(device_type)
    return program if os.access(program, os.X_OK) else None


def how_to_install(device_type: str) -> str:
    """What to type to install vLLM for "cuda" or "cpu"."""
    return f"{INSTALL_SCRIPT} --{BUILDS[device_type]}"


def vllm_command(
    program: Path,
    model: Path,
    *,
    device_type: str,
    dtype: str,
    max_model_len: int,
    block_size: int | None = None,
    num_gpu_blocks: int | None = None,
    kv_cache_bytes: int | None = None,
    max_num_batched_tokens: int | None = None,
    max_num_seqs: int | None = None,
    dummy_weights: bool = False,
    cores: Sequence[int] | None = None,
    threads: str | None = None,
    name: str = "vllm",
) -> ServerCommand:
    """The command of a vLLM server. What is None is left to vLLM.

    Prefix caching is off, so that servers do the same work. Decoding is compiled and in CUDA graphs, as vLLM comes.

    Args:
        program: the ``vllm`` command.
        model: Hugging Face folder; one without a tokenizer is served from a copy that has one.
        device_type: "cuda" or "cpu", the build of ``program``.
        dtype: "float16", "bfloat16" or "float32", of weights and KV cache.
        max_model_len: tokens of prompt and output of one request.
        block_size: tokens of a block.
        num_gpu_blocks: blocks for requests, of ``block_size`` tokens each. The CPU build has as many tokens in host
            memory, in larger blocks if its kernels want them larger.
        kv_cache_bytes: size of the KV cache where ``num_gpu_blocks`` is None.
        max_num_batched_tokens: tokens of an iteration. Longer prompts are computed in chunks.
        max_num_seqs: requests of an iteration. vLLM refuses more of them than tokens; more than blocks never run.
        dummy_weights: whether to serve random weights; the folder then needs a config.json only.
        cores: cores on which the server may run; all usable ones by default.
        threads: cores of the compute threads of the CPU build, such as "0,1", or "auto"; by default all of ``cores``.
        name: the server's name in results.

    Raises:
        FileNotFoundError, ValueError: there is no supported model in the folder.
    """
    flags: dict[str, Any] = {"--dtype": dtype, "--max-model-len": max_model_len}
    if dummy_weights:
        flags["--load-format"] = "dummy"
    if num_gpu_blocks is not None:
        if block_size is None:
            raise ValueError("num_gpu_blocks needs a block_size")
        if device_type == "cpu" and block_size % CPU_BLOCK_SIZE:
            num_gpu_blocks = math.ceil(num_gpu_blocks * block_size / CPU_BLOCK_SIZE)
            block_size = CPU_BLOCK_SIZE
        blocks = num_gpu_blocks + RESERVED_BLOCKS
        token_bytes = ModelConfig.from_folder(model).kv_bytes_per_token(ITEMSIZES[dtype])
        # The override alone would do, but without a size vLLM first looks for memory to fill, and may refuse to start.
        kv_cache_bytes = blocks * block_size * token_bytes
        flags["--num-gpu-blocks-override"] = blocks
    if max_num_seqs is not None:
        max_num_seqs = min(n for n in (max_num_seqs, max_num_batched_tokens, num_gpu_blocks) if n is not None)
    flags |= {
        "--block-size": block_size,
        "--kv-cache-memory-bytes": kv_cache_bytes,
        "--max-num-batched-tokens": max_num_batched_tokens,
        "--max-num-seqs": max_num_seqs,
    }
    given = [text for flag, value in flags.items() if value is not None for text in (flag, str(value))]
    given += ["--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
    arguments = (str(program), "serve", str(servable_folder(model)), *given)
    cores = tuple(sorted(os.sched_getaffinity(0))) if cores is None else tuple(cores)
    environment = dict(ENVIRONMENT)
    if device_type == "cpu":
        environment["VLLM_CPU_OMP_THREADS_BIND"] = threads or ",".join(map(str, cores))
    return ServerCommand(name, arguments, environment, cores)


def servable_folder(model: Path) -> Path:
    """A folder with this model that vLLM can serve: the given one, or one in the cache if it has no tokenizer.

    vLLM turns every answer into text, so it wants a tokenizer. A model that is only a config.json gets one in which
    each token id is a word of its own. The measured requests are token ids, so the words never matter.

    Raises:
        FileNotFoundError: the folder has no config.json.
    """
    if not (model / "config.json").is_file():
        raise FileNotFoundError(f"{model / 'config.json'} is missing: give a Hugging Face model folder")
    if any((model / name).is_file() for name in TOKENIZER_FILES):
        return model
    text = (model / "config.json").read_text(encoding="utf-8")
    config = json.loads(text)
    folder = cache_dir() / "vllm-models" / hashlib.sha256(text.encode()).hexdigest()[:12] / model.resolve().name
    if not (folder / "config.json").is_file():
        write_atomically(folder / "tokenizer.json", one_word_per_id(int(config["vocab_size"])))
        write_atomically(folder / "tokenizer_config.json", json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
        write_atomically(folder / "config.json", text)  # last: with it the folder is complete
    return folder


def one_word_per_id(vocab_size: int) -> str:
    """A tokenizer.json whose words are "t0", "t1", ..., one for each token id. None of them is special."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"t{token}": token for token in range(vocab_size)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer.to_str()
