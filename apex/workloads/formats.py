"""Converts published request traces to request lengths. No text is kept."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apex.workloads.files import PREFIX_TOKENS, TraceRow

if TYPE_CHECKING:
    import pandas as pd

CountTokens = Callable[[list[str]], list[int]]
"""Maps texts to their lengths in tokens."""

BATCH_SIZE = 256
MOONCAKE_LONGEST = 8192


def azure_rows(path: Path, stride: int = 1) -> list[TraceRow]:
    """Every ``stride``-th row of an Azure inference trace (TIMESTAMP, ContextTokens, GeneratedTokens), by arrival."""
    import pandas as pd

    columns = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
    kept = []
    offset = 0
    for chunk in pd.read_csv(path, usecols=columns, chunksize=1_000_000):
        kept.append(chunk.iloc[(-offset) % stride :: stride].copy())  # a view would hold the whole chunk in memory
        offset += len(chunk)
    frame = pd.concat(kept)
    # Timestamps have 0, 6 or 7 digits of a second, with or without a time zone.
    frame["TIMESTAMP"] = arrivals = pd.to_datetime(frame["TIMESTAMP"], format="ISO8601", utc=True, errors="coerce")
    for name in columns[1:]:
        frame[name] = pd.to_numeric(frame[name], errors="coerce")
    if (bad := frame.isin([math.inf]).any(axis=1) | frame.isna().any(axis=1)).any():
        raise ValueError(f"{path}: row {bad.idxmax() + 1} after the header has no time, or no number of tokens")
    frame["TIMESTAMP"] = (arrivals - arrivals.min()).dt.total_seconds()
    ordered = frame.sort_values("TIMESTAMP", kind="stable")[columns]
    return [TraceRow(int(given), int(out), float(arrival)) for arrival, given, out in ordered.itertuples(index=False)]


def neo_rows(path: Path, stride: int = 1) -> list[TraceRow]:
    """The lengths of a workload in NEO's artifact: a JSON list of objects with prompt and max_tokens."""
    items = list(enumerate(json.loads(path.read_text(encoding="utf-8-sig")), start=1))
    return _converted(path, items[::stride], lambda item: TraceRow(int(item["prompt"]), int(item["max_tokens"])))


def mooncake_rows(path: Path, stride: int = 1) -> list[TraceRow]:
    """Requests of at most ``MOONCAKE_LONGEST`` tokens in a trace of Mooncake: a JSON object a line, times in ms."""

    def row(line: str) -> TraceRow:
        item = json.loads(line)
        segments = tuple((1 + block, PREFIX_TOKENS) for block in item["hash_ids"])
        lengths = int(item["input_length"]), int(item["output_length"])
        return TraceRow(*lengths, item["timestamp"] / 1000, segments=segments)

    lines = enumerate(path.read_text(encoding="utf-8-sig").splitlines(), start=1)
    rows = _converted(path, [(number, line) for number, line in lines if line.strip()][::stride], row)
    fitting = [row for row in rows if row.input_tokens + row.output_tokens <= MOONCAKE_LONGEST]
    return sorted(fitting, key=lambda row: row.arrival_s)


def _converted(path: Path, items: Iterable[tuple[int, Any]], make: Callable[[Any], TraceRow]) -> list[TraceRow]:
    """The row that ``make`` makes of each item; numbers of items are lines or places.

    Raises:
        ValueError: one of them is damaged; the message names the file and the number.
    """
    rows = []
    for number, item in items:
        try:
            rows.append(make(item))
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise ValueError(f"{path}:{number}: {type(error).__name__}: {error}") from None
    return rows


def text_rows(pairs: Iterable[tuple[str, str]], count_tokens: CountTokens, max_rows: int) -> list[TraceRow]:
    """Lengths of the first ``max_rows`` pairs of prompt and answer, counted in batches."""
    rows: list[TraceRow] = []
    wanted = itertools.islice(pairs, max_rows)
    while batch := list(itertools.islice(wanted, BATCH_SIZE)):
        inputs = count_tokens([prompt for prompt, _ in batch])
        outputs = count_tokens([answer for _, answer in batch])
        rows += [TraceRow(given, out) for given, out in zip(inputs, outputs, strict=True)]
        print(f"\r  {len(rows)} requests counted ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return rows


def token_counter(tokenizer: Path) -> CountTokens:
    """Counts tokens with a tokenizer.json, or that of a folder, without a chat template.

    Raises:
        RuntimeError: there is no tokenizer.json.
    """
    from swiftllm.model.folder.tokenizer import read_tokenizer

    file = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    if not file.exists():
        raise RuntimeError(f"no tokenizer at {file}: run scripts/prepare_model.py, or pass --tokenizer")
    loaded = read_tokenizer(file)
    return lambda texts: [len(encoding.ids) for encoding in loaded.encode_batch(texts, add_special_tokens=False)]


def dolphin_pairs(lines: Iterable[bytes]) -> Iterator[tuple[str, str]]:
    """Prompt and output of each JSONL record. The output is the chain of thought and the answer."""
    for line in lines:
        if line.strip():
            record = json.loads(line)
            prompt = "\n".join(message["content"] for message in record["messages"])
            yield prompt, "\n".join(filter(None, [record.get("reasoning"), record.get("answer")]))


def livebench_pairs(questions: pd.DataFrame, answers: pd.DataFrame, model: str) -> Iterator[tuple[str, str]]:
    """Prompt and the named model's recorded answer of each question. Several turns of a chat are joined.

    ``questions`` has question_id and turns; ``answers`` has question_id, model_id and choices (the first is used).

    Raises:
        RuntimeError: the model is not among the answers; the message names some that are.
    """
    mine = answers[answers["model_id"] == model]
    if mine.empty:
        known = sorted(answers["model_id"].unique())
        small = [name for name in known if "8b" in name.lower() or "7b" in name.lower()] or known[:20]
        raise RuntimeError(f"LiveBench has no answers of {model!r}; choose by --livebench-model: {', '.join(small)}")
    prompts = dict(zip(questions["question_id"], questions["turns"], strict=True))
    for question_id, choices in zip(mine["question_id"], mine["choices"], strict=True):
        if question_id in prompts:
            yield "\n".join(prompts[question_id]), "\n".join(choices[0]["turns"])
