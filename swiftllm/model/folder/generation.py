"""How a model's authors mean it to be sampled: defaults from its ``generation_config.json``."""

from __future__ import annotations

import json
from pathlib import Path

from swiftllm.core.sampling_params import SamplingParams

DEFAULTS = ("temperature", "top_p", "top_k", "repetition_penalty")


def sampling_defaults(folder: str | Path) -> dict[str, float]:
    """Sampling parameters of a model folder, for requests that do not set them; those that vLLM reads.

    Raises:
        ValueError: the file is no JSON, or a value lies outside its range; the message names the file.
    """
    path = Path(folder) / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        raw = json.loads(path.read_text())
        found = {name: raw[name] for name in DEFAULTS if raw.get(name) is not None}
        SamplingParams(**found)
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path}: {error}; mend it, or serve with --generation-config none") from error
    return found
