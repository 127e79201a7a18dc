"""A small run, with its operator tables."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

LAYERS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "layernorm", "rotary_emb", "act_fn", "embedding")
SIZES = (1, 64, 2048)


def write_csv(path: Path, header: str, rows: Sequence[Sequence[object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header.split(","))
        writer.writerows(rows)


def change_meta(folder: Path, **values: Any) -> Path:
    """Fields of the run's meta.json; those of engine_kwargs by their names there."""
    path = folder / "meta.json"
    meta = json.loads(path.read_text())
    for name, value in values.items():
        (meta["engine_kwargs"] if name.endswith("_size") else meta)[name] = value
    path.write_text(json.dumps(meta))
    return folder


def write_run(folder: Path, num_gpu_blocks: int | None = 200) -> Path:
    """A run of five requests on a card whose every operator takes 10 us and 0.1 us a token."""
    folder.mkdir(parents=True)
    layers = (*LAYERS, "final_layernorm")
    write_csv(folder / "dense.csv", "layer,tokens,time_us", [(name, n, 10 + n / 10) for name in layers for n in SIZES])
    ends = [(name, n, 10 + n / 10) for name in ("lm_head", "sampler") for n in (1, 128)]
    write_csv(folder / "per_sequence.csv", "layer,sequences,time_us", ends)
    attention = [(0, 0, n, c, 5 + n * c / 100) for n, c in product((1, 64), (16, 4096))]
    attention += [(n, c, 0, 0, 7 + n * (n + c) / 1000) for n, c in product((16, 2048), (0, 4096))]
    attention += [
        (n, c, m, d, 20 + n * (n + c) / 1000 + 2 * m * d / 100)
        for n, c, m, d in product((16, 2048), (0, 4096), (1, 64), (16, 4096))
    ]
    write_csv(folder / "attention.csv", "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us", attention)
    write_csv(folder / "timeseries.csv", "t,running,waiting", [(t, 2, 1) for t in range(1, 4)])
    times = [
        {
            "input_toks": 20 + i, "output_toks": 5, "arrival_time": 1e9 + i / 10, "queued_ts": 50 + i / 10,
            "first_token_ts": 50.2 + i / 10, "last_token_ts": 51 + i / 10,
        }
        for i in range(5)
    ]  # fmt: skip
    (folder / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in times))
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 4096}
    meta = {"model": "meta-llama/Llama-3.1-8B", "engine_kwargs": options}
    if num_gpu_blocks is not None:
        meta["kv_cache"] = {"num_gpu_blocks": num_gpu_blocks, "block_size": 16}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder
