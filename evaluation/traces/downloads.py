"""Downloads published files, and datasets of the Hugging Face hub."""

from __future__ import annotations

import importlib.util
import json
import shutil
import urllib.request
from http.client import HTTPResponse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import wrap_file

if TYPE_CHECKING:
    from urllib.response import addinfourl

    import pandas as pd

HUGGING_FACE = "https://huggingface.co"


def open_url(url: str) -> addinfourl | HTTPResponse:
    return urllib.request.urlopen(urllib.request.Request(url, headers={"User-Agent": "apex-download"}), timeout=60)


def download(url: str, path: Path) -> None:
    """Download ``url`` to ``path`` with a progress bar.

    Raises:
        OSError: the download failed (urllib's errors are OSErrors), or ended too early.
    """
    with open_url(url) as response, path.open("wb") as file:
        total = int(response.headers.get("Content-Length") or 0)
        name, console = url.rpartition("/")[2], Console(stderr=True)
        with wrap_file(response, total, description=name, console=console) as reading:
            shutil.copyfileobj(reading, file)
        if total and file.tell() != total:
            raise OSError(f"{url} ended after {file.tell()} of {total} bytes; try again")


def read_parquet(dataset: str, split: str, columns: list[str], folder: Path) -> pd.DataFrame:
    """One split of a Hugging Face dataset, from the hub's list of its parquet files.

    Raises:
        RuntimeError: pandas cannot read parquet here, or there is no such split.
        OSError: the download failed.
    """
    import pandas as pd

    if importlib.util.find_spec("pyarrow") is None:
        raise RuntimeError(f"{dataset} is in parquet: install pyarrow (`make setup` does; or pip install pyarrow)")
    with open_url(f"{HUGGING_FACE}/api/datasets/{dataset}/parquet") as response:
        splits = next(iter(json.load(response).values()))
    if split not in splits:
        raise RuntimeError(f"{dataset} has no split {split!r}, only {sorted(splits)}")
    frames = []
    for url in splits[split]:
        path = folder / "part.parquet"
        download(url, path)
        frames.append(pd.read_parquet(path, columns=columns))
    return pd.concat(frames, ignore_index=True)
