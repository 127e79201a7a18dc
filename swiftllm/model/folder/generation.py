"""How a model's authors mean it to be sampled: defaults from its ``generation_config.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from swiftllm.core.sampling_params import SamplingParams
from swiftllm.model.folder.files import DamagedFile, is_there, read_object, tell

FILE = "generation_config.json"
DEFAULTS = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}
"""The fields that vLLM reads, and what they are called in :class:`SamplingParams`."""
NOT_FOLLOWED = (
    *("min_length", "min_new_tokens", "num_beams", "no_repeat_ngram_size", "typical_p", "epsilon_cutoff", "eta_cutoff"),
    *("penalty_alpha", "guidance_scale", "exponential_decay_length_penalty", "sequence_bias", "bad_words_ids"),
    *("suppress_tokens", "begin_suppress_tokens", "forced_eos_token_id", "stop_strings"),
)
"""Fields by which transformers would choose other tokens. vLLM does not follow them either."""
WITHOUT_EFFECT = (None, [], {}, 0, 1)


def generation_config(folder: str | Path) -> dict[str, Any]:
    """What the file holds; nothing if it is not there or, which is logged, cannot be read."""
    path = Path(folder) / FILE
    try:
        return read_object(path) if is_there(path) else {}
    except (DamagedFile, OSError) as error:
        tell(f"{error}; {FILE} is left aside")
        return {}


def sampling_defaults(folder: str | Path) -> dict[str, float]:
    """Sampling parameters of a model folder, for requests that do not set them; those that vLLM reads.

    A value that makes no sense is left aside, and so is what this engine does not do; both are logged.
    """
    path, raw, found = Path(folder) / FILE, generation_config(folder), {}
    for name, parameter in DEFAULTS.items():
        value = raw.get(name)
        if value is None or (name == "top_k" and value in (-1, 0) and value is not False):  # all tokens
            continue
        if isinstance(value, float) and parameter in ("top_k", "max_tokens") and value.is_integer():
            value = int(value)
        try:
            if isinstance(value, bool):
                raise ValueError(f"{parameter}={value!r} must be a number")
            given: dict[str, Any] = {parameter: value}
            SamplingParams(**given)
        except ValueError as error:
            tell(f"{path}: {name} is left aside: {error}")
        else:
            found[parameter] = value
    others = [name for name in NOT_FOLLOWED if raw.get(name) not in WITHOUT_EFFECT]
    if others:
        tell(f"{path}: {', '.join(others)} not followed: this server has no such defaults of requests")
    return found
