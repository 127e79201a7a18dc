"""The published request traces of configs/traces.yaml, and how each is fetched."""

from __future__ import annotations

import datetime
import importlib.util
import json
import shutil
import urllib.request
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPResponse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import yaml
from rich.console import Console
from rich.progress import wrap_file

from apex.source_tree import CONFIGS
from apex.workloads.files import TraceRow, write_rows
from apex.workloads.formats import (
    azure_rows,
    dolphin_pairs,
    livebench_pairs,
    mooncake_rows,
    neo_rows,
    text_rows,
    token_counter,
)
from swiftllm.model.folder.hub import model_name

if TYPE_CHECKING:
    import pandas as pd

LIVEBENCH_MODEL = "meta-llama-3.1-8b-instruct-turbo"
"""Model whose LiveBench answers are the outputs, unless another is chosen."""
MAX_ROWS = 10_000
"""Most requests from a source of text, unless another number is chosen."""
LIVEBENCH_CATEGORIES = ("reasoning", "math", "coding", "language", "data_analysis", "instruction_following")


@dataclass(frozen=True)
class TextOptions:
    """Options for sources of text."""

    tokenizer: Path
    """Counts the tokens: a tokenizer.json or a folder that has one."""
    max_rows: int
    livebench_model: str
    """Model whose answers are the outputs of LiveBench."""

    @property
    def counted_by(self) -> str:
        """The tokenizer by its model's name: that on the hub, or its folder's."""
        folder = self.tokenizer.parent if self.tokenizer.suffix == ".json" else self.tokenizer
        return f"tokenizer of {model_name(folder)}"


@dataclass(frozen=True)
class Source:
    """A published trace."""

    name: str
    title: str
    origin: str
    licence: str
    size: str
    note: str
    read: str
    """Its reader: of READERS of published lengths, or of TEXTS, whose tokens are counted here."""
    counted: str | None = None
    """Tokenizer of the published lengths; None if tokens are counted here."""
    has_arrivals: bool = False
    stride: int = 1
    """Every so many rows are kept."""

    @property
    def file(self) -> str:
        """Name of the trace file, as in workloads.yaml."""
        return f"{self.name.replace('-', '_')}.csv"


def fetch_dolphin(source: Source, options: TextOptions, folder: Path) -> Generator[tuple[str, str]]:
    # The whole file is 3.8 GB. It is read line by line, and closed after the last wanted row.
    with open_url(source.origin) as response:
        yield from dolphin_pairs(response)


def fetch_livebench(source: Source, options: TextOptions, folder: Path) -> Generator[tuple[str, str]]:
    import pandas as pd

    columns = ["question_id", "turns"]
    questions = [read_parquet(f"livebench/{name}", "test", columns, folder) for name in LIVEBENCH_CATEGORIES]
    columns = ["question_id", "model_id", "choices"]
    answers = read_parquet("livebench/model_answer", "leaderboard", columns, folder)
    yield from livebench_pairs(pd.concat(questions, ignore_index=True), answers, options.livebench_model)


def fetch_osc(source: Source, options: TextOptions, folder: Path) -> Generator[tuple[str, str]]:
    frame = read_parquet("CarperAI/openai_summarize_comparisons", "test", ["prompt", "chosen"], folder)
    yield from zip(frame["prompt"], frame["chosen"], strict=True)


HUGGING_FACE = "https://huggingface.co"


def open_url(url: str) -> HTTPResponse:
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


READERS: dict[str, Callable[[Path, int], list[TraceRow]]] = {
    "azure": azure_rows,
    "neo": neo_rows,
    "mooncake": mooncake_rows,
}
TEXTS: dict[str, Callable[[Source, TextOptions, Path], Generator[tuple[str, str]]]] = {
    "dolphin": fetch_dolphin,
    "livebench": fetch_livebench,
    "osc": fetch_osc,
}
SOURCES = tuple(Source(**entry) for entry in yaml.safe_load((CONFIGS / "traces.yaml").read_text()))


def fetch_rows(source: Source, options: TextOptions, folder: Path) -> list[TraceRow]:
    """Fetch a trace, with ``folder`` for temporary files. Raises as :func:`fetch_trace`."""
    if source.read in READERS:
        download(source.origin, folder / "original")
        return READERS[source.read](folder / "original", source.stride)
    count_tokens = token_counter(options.tokenizer)
    with closing(TEXTS[source.read](source, options, folder)) as pairs:
        return text_rows(pairs, count_tokens, options.max_rows)


def fetch_trace(source: Source, options: TextOptions, folder: Path) -> Path:
    """Fetch a trace into ``folder``, with its provenance. Rows without input or output are dropped and counted.

    Raises:
        OSError, http.client.HTTPException: the download failed.
        RuntimeError: something is missing here or at the source, or no row remains; the message says what to do.
        ValueError, KeyError: the format of the source has changed.
    """
    with TemporaryDirectory() as scratch:
        rows = fetch_rows(source, options, Path(scratch))
    kept = [row for row in rows if row.input_tokens > 0 and row.output_tokens > 0]
    if not kept:
        raise RuntimeError(f"no usable row in {len(rows)}")
    provenance = {
        **{name: getattr(source, name) for name in ("name", "title", "origin", "licence", "note")},
        "tokens_counted_by": source.counted or options.counted_by,
        "livebench_model": options.livebench_model if source.name == "livebench" else None,
        "fetched": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "rows": len(kept),
        "rows_left_out": len(rows) - len(kept),
        "mean_input_tokens": round(sum(row.input_tokens for row in kept) / len(kept), 1),
        "mean_output_tokens": round(sum(row.output_tokens for row in kept) / len(kept), 1),
    }
    path = folder / source.file
    write_rows(path, kept, provenance)
    return path
