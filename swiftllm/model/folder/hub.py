"""The folder of a model: on this machine, or downloaded from the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from swiftllm.files import expand

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
TEXT_FILES = ["*.json", "*.jinja", "tokenizer.model"]
WEIGHT_FILES = ["model*.safetensors", "gptq_model*.safetensors"]
OTHER_FORMATS = ["*/*", "consolidated*"]  # copies of the same weights


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

    wanted = TEXT_FILES + WEIGHT_FILES * weights
    try:
        return Path(snapshot_download(str(model), allow_patterns=wanted, ignore_patterns=OTHER_FORMATS))
    except (OSError, ValueError) as error:  # all that the hub raises for names, rights, network and disk
        why = str(error).strip().splitlines()[0]
        raise FileNotFoundError(
            f"{model} is no folder here, and not to be had from the Hugging Face hub: {why} (a gated model needs "
            "HF_TOKEN; without a network, give the folder of a model)"
        ) from error


def model_name(folder: str | Path) -> str:
    """The hub's name of a model whose folder is in the hub's cache; else the name of the folder."""
    folder = Path(folder)
    kind, *name = folder.parent.parent.name.split("--")
    if folder.parent.name == "snapshots" and kind == "models":
        return "/".join(name)
    return folder.name
