"""A model's folder: where it is, its files, and its authors' defaults of sampling."""

from __future__ import annotations

import fnmatch
import json
import logging
import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from swiftllm.core.request import SamplingParams
from swiftllm.files import expand

# -- files -------------------------------------------------------------------------------------------------------------
# The files of a model's folder: their names, which of several counts, and how one is read. All as transformers has it;
# where it is not followed, :func:`tell` says so.

logger = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
"""A folder with one of these has a tokenizer."""
TEXT_FILES = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "additional_chat_templates/*.jinja")
"""All that is read beside the weights."""
INDEX = ".index.json"
CHECKPOINTS = (
    "model.safetensors",
    f"model.safetensors{INDEX}",
    f"gptq_model*.safetensors{INDEX}",  # as AutoGPTQ writes them
    "gptq_model*.safetensors",
)
"""The first that is there counts. Files of other names are other forms of the same weights."""


class DamagedFile(ValueError):
    """A file cannot be read, or does not hold what it must; the message names it."""


def read_object(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        DamagedFile: it holds none.
        OSError: it cannot be read.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise DamagedFile(f"{path} holds no JSON object")
    return value


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the weights of a folder."""
    present = os.listdir(folder)
    named = [folder / name for pattern in CHECKPOINTS for name in sorted(fnmatch.filter(present, pattern))]
    first = next((path for path in named if path.is_file()), None)
    if first is None and named:
        raise FileNotFoundError(f"{absence_of(named[0])}: download the model again")
    if first is None:
        raise FileNotFoundError(
            f"{folder} has neither {CHECKPOINTS[0]} nor {CHECKPOINTS[1]}; "
            "convert the model to safetensors, or use load_format='dummy' to run without weights"
        )
    if not first.name.endswith(INDEX):
        return [first]
    files = [folder / name for name in sorted(set(weight_map(first).values()))]
    for path in files:
        if not path.is_file():
            raise FileNotFoundError(f"{absence_of(path)}, and {first.name} names it: finish the download")
    return files


def weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor that an index names."""
    places = read_object(index).get("weight_map")
    if not isinstance(places, Mapping) or not places or not all(isinstance(file, str) for file in places.values()):
        raise DamagedFile(f"{index} has no weight_map from tensors to files: download it again")
    return dict(places)


def is_there(path: Path) -> bool:
    """Whether a file is in a folder, which need not have it."""
    if path.is_symlink() and not path.exists():
        raise FileNotFoundError(f"{absence_of(path)}: download the model again")
    return path.is_file()


def absence_of(path: Path) -> str:
    """What is wrong with a file that is not there."""
    if path.is_symlink():
        return f"{path} is a link to {os.path.realpath(path)}, which is not there"
    return f"{path} is not there" if not path.exists() else f"{path} is no file"


@cache
def tell(message: str) -> None:
    """Log, once a process, what of a folder is not followed. The message names the file and the field."""
    logger.warning(message)


# -- defaults of sampling ----------------------------------------------------------------------------------------------
# How a model's authors mean it to be sampled: defaults from its ``generation_config.json``.

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


# -- from a name to a folder -------------------------------------------------------------------------------------------
# The folder of a model: on this machine, or downloaded from the Hugging Face hub.

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
WEIGHT_FILES = ("model*.safetensors", "gptq_model*.safetensors")
OTHER_FORMATS = ["*/*.json", "*/*.safetensors", "*/tokenizer.model", "consolidated*"]  # copies of the same weights


def model_folder(model: str | Path, weights: bool = True) -> Path:
    """The folder of a model: ``model`` itself, or the hub's model of this name (``meta-llama/Llama-3.1-8B``).

    The hub's models are kept in its cache, which other programs share. Missing files are downloaded, safetensors only
    with ``weights``. The hub's variables apply: HF_HOME, HF_TOKEN, HF_HUB_OFFLINE, HF_ENDPOINT.

    Raises:
        FileNotFoundError: neither a folder nor a model of the hub that can be downloaded; the message says why.
    """
    folder = expand(model)
    if folder.exists() or not HUB_NAME.fullmatch(str(model)):
        return folder
    from huggingface_hub import snapshot_download  # not needed for a folder

    wanted = [*TEXT_FILES, *WEIGHT_FILES * weights]
    try:
        return Path(snapshot_download(str(model), allow_patterns=wanted, ignore_patterns=OTHER_FORMATS))
    except (OSError, ValueError) as error:  # all that the hub raises for names, rights, network and disk
        why = str(error).strip().splitlines()[0]
        raise FileNotFoundError(
            f"{model} is no folder here, and not to be had from the Hugging Face hub: {why} (a gated model needs "
            "HF_TOKEN; without a network, give the folder of a model)"
        ) from error


def model_name(folder: str | Path) -> str:
    """The hub's name of a model whose folder is in the hub's cache; else the name of the folder, of "." too."""
    folder = Path(os.path.abspath(folder))
    kind, *name = folder.parent.parent.name.split("--")
    if folder.parent.name == "snapshots" and kind == "models":
        return "/".join(name)
    return folder.name or str(folder)
