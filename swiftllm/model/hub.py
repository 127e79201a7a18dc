"""Where a model comes from: a folder on this machine, or a name on the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
TEXT_FILES = ["*.json", "*.jinja", "tokenizer.model"]
WEIGHT_FILES = ["model*.safetensors"]
OTHER_FORMATS = ["*/*", "consolidated*"]  # the same weights once more


def model_folder(model: str | Path, weights: bool = True) -> Path:
    """The folder of a model: ``model`` itself, or what the hub has under this name (``meta-llama/Llama-3.1-8B``).

    A model of the hub lies in the hub's cache, which other programs share; what is not there yet is downloaded, without
    the safetensors unless ``weights``. The hub's variables hold: HF_HOME, HF_TOKEN, HF_HUB_OFFLINE, HF_ENDPOINT.

    Raises:
        FileNotFoundError: there is no such folder, and the hub gives no such model; the message says why.
    """
    folder = Path(model).expanduser()
    if folder.exists() or not HUB_NAME.fullmatch(str(model)):
        return folder
    from huggingface_hub import snapshot_download  # a folder does without

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
    """What a model is called: by the hub's name where the folder is of the hub's cache, otherwise as the folder is."""
    folder = Path(folder)
    kind, *name = folder.parent.parent.name.split("--")
    if folder.parent.name == "snapshots" and kind == "models":
        return "/".join(name)
    return folder.name
