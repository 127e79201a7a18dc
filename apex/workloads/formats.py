"""Converts published request traces, and files of one's own, to request lengths. No text is kept."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apex.workloads.files import PREFIX_TOKENS, TraceRow, by_arrival, read_rows
from swiftllm.model.folder import model_name

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
        number = bad.index[int(bad.to_numpy().argmax())] + 1
        raise ValueError(f"{path}: row {number} after the header has no time, or no number of tokens")
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
    return sorted(fitting, key=lambda row: row.start_s)


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
    from swiftllm.model.tokenizer import read_tokenizer

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


# -- files of one's own ------------------------------------------------------------------------------------------------

FORMATS = (
    "CSV with the columns arrival_s (may be blank), input_tokens and output_tokens, or with those of Azure's traces; "
    "lines of JSON with the same names, with Mooncake's (timestamp in ms, input_length, output_length), or with "
    "prompt and output_tokens, as in vLLM's custom data sets; a ShareGPT file; or a saved result of `vllm bench serve`"
)
"""What :func:`read_file` reads."""


@dataclass(frozen=True)
class FileRequest:
    """An entry of a JSON file before its texts are counted: a length in tokens, or the text itself."""

    place: str
    prompt: int | str
    output: int | str
    arrival_s: float | None = None
    blocks: tuple[int, ...] = ()


def read_file(path: Path, tokenizer: Path | None = None) -> tuple[tuple[TraceRow, ...], str]:
    """The requests of a file in one of ``FORMATS``, and what is to be said of their lengths, or "".

    Entries without a prompt or an output, as failed requests and unanswered conversations are, are left out and
    counted; lines of the formats that are only of lengths must have both.

    Args:
        tokenizer: counts the tokens of texts; a tokenizer.json or a folder that has one.

    Raises:
        ValueError: the file has none of the forms, or an entry is damaged; the message names the file and its line, or
            its place where the file is one JSON value. Or there are texts and no tokenizer.
        OSError: it cannot be read.
    """
    if path.suffix.lower() not in (".json", ".jsonl"):
        return read_rows(path), ""
    items = _items(path)
    if any(isinstance(text, str) for item in items for text in (item.prompt, item.output)):
        items, counted_by = _counted(path, items, tokenizer)
    else:
        counted_by = ""
    kept = [item for item in items if item.prompt and item.output]
    if not kept:
        raise ValueError(f"{path}: no request with a prompt and an output")
    first_s = min((item.arrival_s for item in kept if item.arrival_s is not None), default=0.0)
    rows = []
    for item in kept:
        arrival_s = None if item.arrival_s is None else item.arrival_s - first_s
        segments = tuple((1 + block, PREFIX_TOKENS) for block in item.blocks)
        try:
            lengths = _both(int(item.prompt), int(item.output))
            rows.append(TraceRow(*lengths, arrival_s, segments=segments))
        except ValueError as error:
            raise ValueError(f"{path}:{item.place}: {error}") from None
    left_out = (
        f"{len(items) - len(kept)} of {len(items)} entries left out, without a prompt or an output"
        if len(kept) < len(items)
        else ""
    )
    return by_arrival(path, rows), "; ".join(filter(None, (left_out, counted_by)))


def _items(path: Path) -> list[FileRequest]:
    """
    Raises:
        ValueError: see :func:`read_file`.
    """
    text = path.read_text(encoding="utf-8-sig")
    try:
        whole = json.loads(text)
    except ValueError:
        whole = None  # lines, of which the damaged one is found below
    if isinstance(whole, list):
        return _each(path, ((f"entry {number}", item) for number, item in enumerate(whole, start=1)), _entry)
    if isinstance(whole, dict) and {"input_lens", "total_input_tokens"} & whole.keys():
        return _bench_result(path, whole)
    lines = ((str(number), line) for number, line in enumerate(text.splitlines(), start=1) if line.strip())
    return _each(path, lines, lambda place, line: _entry(place, json.loads(line)))


def _each(
    path: Path, entries: Iterable[tuple[str, Any]], make: Callable[[str, Any], FileRequest | None]
) -> list[FileRequest]:
    items = []
    for place, entry in entries:
        try:
            items.append(make(place, entry))
        except KeyError as error:
            raise ValueError(f"{path}:{place}: it lacks {error}") from None
        except (ValueError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{path}:{place}: {error}") from None
    return [item for item in items if item is not None]


def _entry(place: str, entry: Any) -> FileRequest:
    """A JSON object with lengths, or with texts."""
    if not isinstance(entry, dict):
        raise ValueError("it is no JSON object")
    if "conversations" in entry:  # ShareGPT: the first turn and its answer, as in `vllm bench serve`
        prompt, output, *_ = [*(str(turn["value"]) for turn in entry["conversations"][:2]), "", ""]
        return FileRequest(place, prompt, output)
    if "input_length" in entry:  # Mooncake
        lengths = _both(_whole(entry, "input_length"), _whole(entry, "output_length"))
        at_s = None if entry.get("timestamp") is None else float(entry["timestamp"]) / 1000
        return FileRequest(place, *lengths, at_s, tuple(map(int, entry.get("hash_ids", ()))))
    if "prompt" in entry:  # vLLM's custom data set
        return FileRequest(place, str(entry["prompt"]), _whole(entry, "output_tokens"))
    if "input_tokens" in entry:
        lengths = _both(_whole(entry, "input_tokens"), _whole(entry, "output_tokens"))
        at_s = None if entry.get("arrival_s") is None else float(entry["arrival_s"])
        return FileRequest(place, *lengths, at_s)
    raise ValueError(f"it has none of the known forms, which are {FORMATS}")


def _whole(entry: Mapping[str, Any], name: str) -> int:
    value = entry[name]
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}={value!r} is no whole number")
    return value


def _both(given: int, out: int) -> tuple[int, int]:
    if min(given, out) < 1:
        raise ValueError("lengths must be at least 1 token")
    return given, out


def _bench_result(path: Path, result: Mapping[str, Any]) -> list[FileRequest]:
    """The requests of a result that `vllm bench serve --save-result --save-detailed` wrote."""
    if not {"input_lens", "output_lens"} <= result.keys():
        raise ValueError(f"{path}: it has no lengths of single requests: save it with --save-detailed")
    given, out = result["input_lens"], result["output_lens"]
    start_times = result.get("start_times") or [None] * len(given)
    if not len(given) == len(out) == len(start_times):
        raise ValueError(f"{path}: input_lens, output_lens and start_times are not of one length")

    def item(place: str, values: tuple[Any, Any, Any]) -> FileRequest:
        lengths = {"input_lens": values[0], "output_lens": values[1]}
        at_s = None if values[2] is None else float(values[2])
        return FileRequest(place, _whole(lengths, "input_lens"), _whole(lengths, "output_lens"), at_s)

    entries = enumerate(zip(given, out, start_times, strict=True), start=1)
    return _each(path, ((f"request {number}", values) for number, values in entries), item)


def _counted(path: Path, items: Sequence[FileRequest], tokenizer: Path | None) -> tuple[list[FileRequest], str]:
    """The entries with the tokens of their texts, and who counted them."""
    if tokenizer is None:
        raise ValueError(
            f"{path} has texts, whose tokens must be counted: give --tokenizer, a tokenizer.json or its folder"
        )
    try:
        count = token_counter(tokenizer)
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    texts = [text for item in items for text in (item.prompt, item.output) if isinstance(text, str)]
    tokens = iter(count(texts))
    counted = [
        replace(item, **{name: next(tokens) for name in ("prompt", "output") if isinstance(getattr(item, name), str)})
        for item in items
    ]
    folder = tokenizer.parent if tokenizer.suffix == ".json" else tokenizer
    return counted, f"tokens counted by the tokenizer of {model_name(folder)}"
