"""Reads a real run: a folder with the times of its requests, its load over time, its settings and its operator times.

- ``requests.jsonl``: input_toks, output_toks, arrival_time, queued_ts, first_token_ts, last_token_ts, in seconds.
- ``timeseries.csv``: t in seconds from the start, running and waiting requests.
- ``meta.json``: model and engine_kwargs; kv_cache with num_gpu_blocks and block_size where the pool was recorded;
  optional: link, a name in ``configs/hardware`` or a .yaml file: what joins the GPUs.
- the files of :mod:`apex.simulator.hardware_files`. Each file may be compressed, with ``.gz``.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apex.simulator.hardware_files import number, read_table, table_file
from apex.source_tree import CONFIGS, configs_folder


@dataclass(frozen=True)
class RunModel:
    """Layers, elements of a token between them, and tokens of the vocabulary."""

    num_layers: int
    hidden_size: int
    vocab_size: int


MODELS = {
    "llama-3.1-8b": RunModel(32, 4096, 128256),
    "llama-3.1-70b": RunModel(80, 8192, 128256),
    "llama-3.2-1b": RunModel(16, 2048, 128256),
    "llama-3.2-3b": RunModel(28, 3072, 128256),
    "llama-3.3-70b": RunModel(80, 8192, 128256),
    "mistral-7b": RunModel(32, 4096, 32768),
    "mixtral-8x7b": RunModel(32, 4096, 32000),
    "qwen2.5-7b": RunModel(28, 3584, 152064),
    "qwen2.5-14b": RunModel(48, 5120, 152064),
    "qwen2.5-32b": RunModel(64, 5120, 152064),
    "qwen2.5-72b": RunModel(80, 8192, 152064),
    "qwen3-0.6b": RunModel(28, 1024, 151936),
    "qwen3-1.7b": RunModel(28, 2048, 151936),
    "qwen3-4b": RunModel(36, 2560, 151936),
    "qwen3-8b": RunModel(36, 4096, 151936),
    "qwen3-14b": RunModel(40, 5120, 151936),
    "qwen3-32b": RunModel(64, 5120, 151936),
    "qwen3-30b-a3b": RunModel(48, 2048, 151936),
}
"""By the beginning of the name, without its owner and in lower case."""


def find_model(name: str, config: Path | None = None) -> RunModel:
    """The sizes of a model, from the config.json of a folder if one is given.

    Raises:
        ValueError: it is unknown, or the file lacks a size.
    """
    if config is not None:
        return _read_config(config)
    short = name.rsplit("/", 1)[-1].lower()
    known = [model for beginning, model in MODELS.items() if short == beginning or short.startswith(f"{beginning}-")]
    if not known:
        raise ValueError(
            f"the layers of {name!r} are not known, only those of {', '.join(MODELS)}: give the folder of its "
            "config.json with --run-model"
        )
    return known[-1]


def _read_config(folder: Path) -> RunModel:
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return RunModel(int(raw["num_hidden_layers"]), int(raw["hidden_size"]), int(raw["vocab_size"]))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} lacks num_hidden_layers, hidden_size or vocab_size: {error}") from None


# -- files ------------------------------------------------------------------------------------------------------------

RUNS = CONFIGS / "groundtruth"
DEFAULT_DTYPE = "bfloat16"  # of the models' files
REQUEST_FIELDS = ("input_toks", "output_toks", "arrival_time", "queued_ts", "first_token_ts", "last_token_ts")


@dataclass(frozen=True)
class RunRequest:
    """A request of a run; times are seconds from the first arrival.

    ``queued_s`` is when the engine took it in. The time to the first token counts from there, as in vLLM's metrics.
    """

    prompt_len: int
    output_len: int
    arrival_s: float
    queued_s: float
    first_token_s: float
    last_token_s: float


@dataclass(frozen=True)
class LoadSample:
    """Running and waiting requests at a time, in seconds from the start of the run."""

    time_s: float
    running: float
    waiting: float


@dataclass(frozen=True)
class RealRun:
    """A real run. ``num_gpu_blocks`` is None where the run did not record its pool, ``link`` where it names none."""

    name: str
    folder: Path
    model: str
    device: str | None
    requests: tuple[RunRequest, ...]
    load: tuple[LoadSample, ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    tensor_parallel: int
    data_parallel: int
    dtype: str
    num_gpu_blocks: int | None
    block_size: int
    link: str | None = None


def known_runs() -> list[str]:
    """Sorted names of the runs in ``configs/groundtruth``."""
    return sorted(path.name for path in configs_folder("groundtruth").iterdir() if path.is_dir())


def find_run(name_or_folder: str | Path) -> Path:
    """The folder of a known run, or the folder itself.

    Raises:
        ValueError: there is neither; the message lists the known runs.
    """
    for folder in (Path(name_or_folder), RUNS / name_or_folder):
        if folder.is_dir():
            return folder
    raise ValueError(f"no run {str(name_or_folder)!r}: give its folder, or one of {', '.join(known_runs())}")


def read_run(folder: Path) -> RealRun:
    """Read a run.

    Raises:
        ValueError: a file is missing or malformed; the message names the file and what it lacks.
    """
    meta = _read_meta(folder)
    options, pool = meta["engine_kwargs"], meta.get("kv_cache") or {}
    path = folder / "meta.json"
    return RealRun(
        name=folder.name,
        folder=folder,
        model=meta["model"],
        device=(meta.get("hardware") or {}).get("device_name"),
        requests=_read_requests(folder),
        load=_read_load(folder),
        max_num_seqs=_whole(path, options, "max_num_seqs"),
        max_num_batched_tokens=_whole(path, options, "max_num_batched_tokens"),
        max_model_len=None if options.get("max_model_len") is None else _whole(path, options, "max_model_len"),
        tensor_parallel=_whole(path, options, "tensor_parallel_size", 1),
        data_parallel=_whole(path, options, "data_parallel_size", 1),
        dtype=DEFAULT_DTYPE if options.get("dtype", "auto") == "auto" else str(options["dtype"]),
        num_gpu_blocks=None if pool.get("num_gpu_blocks") is None else _whole(path, pool, "num_gpu_blocks"),
        block_size=_whole(path, pool, "block_size", 16),
        link=meta.get("link"),
    )


def _read_text(folder: Path, name: str) -> str:
    path = table_file(folder, name)
    if path is None:
        raise ValueError(f"{folder / name} is missing")
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def _read_meta(folder: Path) -> dict[str, Any]:
    path = folder / "meta.json"
    try:
        meta = json.loads(_read_text(folder, "meta.json"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(meta, dict) or not isinstance(meta.get("model"), str):
        raise ValueError(f'{path} lacks "model", the name of the model')
    if not isinstance(meta.get("link", ""), str):
        raise ValueError(f"{path}: link={meta['link']!r} must be a name in configs/hardware or a .yaml file")
    if not isinstance(meta.get("engine_kwargs"), dict):
        raise ValueError(f'{path} lacks "engine_kwargs", with max_num_seqs and max_num_batched_tokens')
    return meta


def _whole(path: Path, values: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = values.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{path}: {name}={value!r} must be a whole number from 1 on")
    return value


def _read_requests(folder: Path) -> tuple[RunRequest, ...]:
    path = folder / "requests.jsonl"
    rows = []
    for line, text in enumerate(_read_text(folder, "requests.jsonl").splitlines(), 1):
        try:
            raw = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {line} is not JSON: {error}") from None
        if not isinstance(raw, dict):
            raise ValueError(f"{path}, line {line} is no JSON object")
        rows.append([number(path, line, raw, field) for field in REQUEST_FIELDS])
        if not (rows[-1][0] >= 1 and rows[-1][1] >= 1 and rows[-1][3] <= rows[-1][4] <= rows[-1][5]):
            raise ValueError(f"{path}, line {line}: it needs a prompt, an output, and times in order")
    if not rows:
        raise ValueError(f"{path} has no request")
    # Arrivals are times of the client's clock, all others of the engine's. No request is queued before it arrives.
    start = min(row[2] for row in rows)
    offset = min(row[3] - row[2] for row in rows) + start
    requests = [
        RunRequest(int(prompt), int(output), arrival - start, queued - offset, first - offset, last - offset)
        for prompt, output, arrival, queued, first, last in rows
    ]
    return tuple(sorted(requests, key=lambda request: request.arrival_s))


def _read_load(folder: Path) -> tuple[LoadSample, ...]:
    path, columns = folder / "timeseries.csv", ("t", "running", "waiting")
    rows = read_table(folder, "timeseries.csv", columns)
    return tuple(
        LoadSample(*(number(path, line, row, column) for column in columns)) for line, row in enumerate(rows, 2)
    )
