"""Says which GPU pool would fit where a point ran out of GPU memory."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from swiftllm.config import EngineConfig
from swiftllm.machine import InsufficientMemory

SIZES = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
NEEDED = re.compile(r"[Tt]ried to allocate ([\d.]+) (KiB|MiB|GiB)")
FREE = re.compile(r"of which ([\d.]+) (KiB|MiB|GiB) is free")
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@contextlib.contextmanager
def explained(config: EngineConfig) -> Iterator[None]:
    """Turns torch's error into one that names a GPU pool that fits.

    Raises:
        InsufficientMemory: the GPU's memory did not suffice.
    """
    import torch  # only points that really run load it

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise InsufficientMemory(advice(str(error), config)) from error


def advice(message: str, config: EngineConfig) -> str:
    """What to do about torch's message, for an engine of this configuration with a pool of known size."""
    from swiftllm.model.config import ModelConfig

    first_line = message.strip().splitlines()[0] if message.strip() else "CUDA out of memory"
    blocks = config.num_gpu_blocks
    needed = _bytes(NEEDED, message)
    if blocks is None or needed is None:
        return f"the GPU's memory did not suffice: give a smaller --num-gpu-blocks. {first_line}"
    block = ModelConfig.from_folder(Path(config.model)).kv_bytes_per_token(ITEM_BYTES.get(config.dtype, 2))
    missing = needed - (_bytes(FREE, message) or 0)
    fewer = max(1, -(-missing // (block * config.block_size)))
    if fewer >= blocks:
        return (
            f"the GPU's memory did not suffice, and a smaller pool than {blocks:,} KV blocks does not help: "
            f"lower --max-num-batched-tokens, or take a smaller model. {first_line}"
        )
    return (
        f"the GPU's memory did not suffice beside {blocks:,} KV blocks; a pool of {blocks - fewer:,} would fit: "
        f"--num-gpu-blocks {blocks - fewer}. {first_line}"
    )


def _bytes(pattern: re.Pattern[str], message: str) -> int | None:
    found = pattern.search(message)
    return None if found is None else int(float(found[1]) * SIZES[found[2]])
