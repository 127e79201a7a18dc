#!/usr/bin/env python3
"""Fetch the original request traces and turn each into request lengths.

    python scripts/download_traces.py --list
    python scripts/download_traces.py azure2023-conv osc
    python scripts/download_traces.py all

Each trace becomes `<name>.csv` with the columns arrival_s (seconds from the first request, empty where the source has
no arrivals), input_tokens and output_tokens, and `<name>.json` that says where it came from and how it was made,
under `${APEX_CACHE_DIR:-~/.cache/apex}/traces`, where the evaluation finds them. No text is kept.

Sources of text are counted with --tokenizer, a folder or a tokenizer.json, without a chat template. Sources in
parquet need one more package: `pip install pyarrow`.

The conversions are covered by the test suite; the downloads themselves are not, since they need the sources' servers.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import http.client
import importlib.util
import itertools
import json
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from urllib.response import addinfourl

    import pandas as pd

CACHE_DIR = Path(os.environ.get("APEX_CACHE_DIR") or Path.home() / ".cache" / "apex").expanduser()
DEFAULT_TOKENIZER = CACHE_DIR / "models" / "SmolLM2-135M-Instruct"

GITHUB = "https://raw.githubusercontent.com"
HUGGING_FACE = "https://huggingface.co"
AZURE_2023 = f"{GITHUB}/Azure/AzurePublicDataset/master/data/AzureLLMInferenceTrace_conv.csv"
# "infererence" is how the address is spelled.
AZURE_2024 = (
    "https://azurepublicdatasettraces.blob.core.windows.net/azurellminfererencetrace/"
    "AzureLLMInferenceTrace_conv_1week.csv"
)
LIVEBENCH_CATEGORIES = ["reasoning", "math", "coding", "language", "data_analysis", "instruction_following"]
DOLPHIN = f"{HUGGING_FACE}/datasets/cognitivecomputations/dolphin-r1/resolve/main/dolphin-r1-reasoning-deepseek.jsonl"

# The 2024 week has 27 million requests. One in 1,000 keeps the lengths' distribution and the daily rhythm of the
# arrivals (though not their burstiness) in a file the size of the 2023 hour.
AZURE_2024_STRIDE = 1000


class Row(NamedTuple):
    arrival_s: float | None
    input_tokens: int
    output_tokens: int


CountTokens = Callable[[list[str]], list[int]]


@dataclass(frozen=True)
class Options:
    """What the user chose. `count_tokens` maps texts to their lengths in tokens."""

    count_tokens: CountTokens
    max_rows: int
    livebench_model: str


# ---- downloading


def open_url(url: str) -> addinfourl | http.client.HTTPResponse:
    return urllib.request.urlopen(urllib.request.Request(url, headers={"User-Agent": "apex-download"}), timeout=60)


def download(url: str, path: Path) -> None:
    """Copy `url` to `path` with a line of progress. Raises OSError (urllib's errors are) on failure or a short file."""
    start = time.monotonic()
    with open_url(url) as response, path.open("wb") as file:
        total = int(response.headers.get("Content-Length") or 0)
        done = 0
        while chunk := response.read(1 << 20):
            file.write(chunk)
            done += len(chunk)
            rate = done / max(time.monotonic() - start, 1e-3)
            of = f" of {total / 1e6:.0f}" if total else ""
            print(f"\r  {done / 1e6:.0f}{of} MB, {rate / 1e6:.1f} MB/s ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    if total and done != total:
        raise OSError(f"{url} ended after {done} of {total} bytes; try again")


def read_parquet(dataset: str, split: str, columns: list[str], folder: Path) -> pd.DataFrame:
    """One split of a Hugging Face dataset, through the list of parquet files that the hub keeps for it."""
    import pandas as pd

    if importlib.util.find_spec("pyarrow") is None:
        raise RuntimeError(f"{dataset} is in parquet: pip install pyarrow, then try again")
    with open_url(f"{HUGGING_FACE}/api/datasets/{dataset}/parquet") as response:
        splits = next(iter(json.load(response).values()))
    if split not in splits:
        raise RuntimeError(f"{dataset} has no split {split!r}, only {sorted(splits)}")
    frames = []
    for index, url in enumerate(splits[split]):
        path = folder / f"{dataset.replace('/', '-')}-{split}-{index}.parquet"
        print(f"  {url}", file=sys.stderr)
        download(url, path)
        frames.append(pd.read_parquet(path, columns=columns))
        path.unlink()
    return pd.concat(frames, ignore_index=True)


# ---- converting


def convert_azure(path: Path, stride: int = 1) -> list[Row]:
    """Every `stride`-th row of an Azure inference trace (TIMESTAMP, ContextTokens, GeneratedTokens), by arrival."""
    import pandas as pd

    rows: list[tuple[pd.Timestamp, int, int]] = []
    offset = 0
    for chunk in pd.read_csv(path, chunksize=1_000_000):
        kept = chunk.iloc[(-offset) % stride :: stride]
        offset += len(chunk)
        # Timestamps come with 0, 6 or 7 digits of a second, with or without a time zone.
        arrivals = pd.to_datetime(kept["TIMESTAMP"], format="ISO8601", utc=True)
        rows += zip(arrivals, kept["ContextTokens"], kept["GeneratedTokens"], strict=True)
    rows.sort(key=lambda row: row[0])
    first = rows[0][0] if rows else None
    return [Row((arrival - first).total_seconds(), int(i), int(o)) for arrival, i, o in rows]


def convert_texts(pairs: Iterable[tuple[str, str]], count_tokens: CountTokens, max_rows: int) -> list[Row]:
    """Lengths of the first `max_rows` pairs of prompt and answer, counted in batches."""
    rows = []
    for batch in batches(itertools.islice(pairs, max_rows), 256):
        inputs = count_tokens([prompt for prompt, _ in batch])
        outputs = count_tokens([answer for _, answer in batch])
        rows += [Row(None, i, o) for i, o in zip(inputs, outputs, strict=True)]
        print(f"\r  {len(rows)} requests counted ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return rows


def batches(items: Iterable, size: int) -> Iterator[list]:
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield batch


def dolphin_pairs(lines: Iterable[bytes]) -> Iterator[tuple[str, str]]:
    """Prompt and output of each JSONL record; the output is the chain of thought and the answer after it."""
    for line in lines:
        if line.strip():
            record = json.loads(line)
            prompt = "\n".join(message["content"] for message in record["messages"])
            yield prompt, "\n".join(filter(None, [record.get("reasoning"), record.get("answer")]))


def livebench_pairs(questions: pd.DataFrame, answers: pd.DataFrame, model: str) -> Iterator[tuple[str, str]]:
    """Prompt and the named model's recorded answer of each question; several turns are joined.

    `questions` has question_id and turns, `answers` has question_id, model_id and choices (the first choice counts).
    Raises RuntimeError, naming some that are there, when the model is not among the answers.
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


# ---- the traces


def fetch_azure2023(options: Options, folder: Path) -> list[Row]:
    download(AZURE_2023, folder / "azure.csv")
    return convert_azure(folder / "azure.csv")


def fetch_azure2024(options: Options, folder: Path) -> list[Row]:
    download(AZURE_2024, folder / "azure.csv")
    return convert_azure(folder / "azure.csv", AZURE_2024_STRIDE)


def fetch_livebench(options: Options, folder: Path) -> list[Row]:
    import pandas as pd

    questions = pd.concat(
        [
            read_parquet(f"livebench/{category}", "test", ["question_id", "turns"], folder)
            for category in LIVEBENCH_CATEGORIES
        ],
        ignore_index=True,
    )
    columns = ["question_id", "model_id", "choices"]
    answers = read_parquet("livebench/model_answer", "leaderboard", columns, folder)
    pairs = livebench_pairs(questions, answers, options.livebench_model)
    return convert_texts(pairs, options.count_tokens, options.max_rows)


def fetch_dolphin(options: Options, folder: Path) -> list[Row]:
    # Read line by line and hung up on after the last row wanted: the whole file is 3.8 GB.
    with open_url(DOLPHIN) as response:
        return convert_texts(dolphin_pairs(response), options.count_tokens, options.max_rows)


def fetch_osc(options: Options, folder: Path) -> list[Row]:
    frame = read_parquet("CarperAI/openai_summarize_comparisons", "test", ["prompt", "chosen"], folder)
    pairs = zip(frame["prompt"], frame["chosen"], strict=True)
    return convert_texts(pairs, options.count_tokens, options.max_rows)


@dataclass(frozen=True)
class Source:
    name: str
    title: str
    origin: str
    licence: str
    size: str
    counted: str  # whose tokens the lengths are; "tokenizer" means the one of --tokenizer
    note: str
    fetch: Callable[[Options, Path], list[Row]]

    @property
    def stem(self) -> str:
        return self.name.replace("-", "_")


SOURCES = (
    Source(
        name="azure2023-conv",
        title="Azure conversation, one hour of November 2023 (Splitwise, ISCA'24)",
        origin=AZURE_2023,
        licence="CC-BY-4.0",
        size="1 MB",
        counted="Azure's own, tokenizer not stated",
        note="every request",
        fetch=fetch_azure2023,
    ),
    Source(
        name="azure2024-conv",
        title="Azure conversation, one week of May 2024 (DynamoLLM, HPCA'25)",
        origin=AZURE_2024,
        licence="CC-BY-4.0",
        size="1.1 GB",
        counted="Azure's own, tokenizer not stated",
        note=f"one request in {AZURE_2024_STRIDE}, so the arrival rate is {AZURE_2024_STRIDE} times lower",
        fetch=fetch_azure2024,
    ),
    Source(
        name="livebench",
        title="LiveBench questions with a model's recorded answers",
        origin=f"{HUGGING_FACE}/livebench",
        licence="Apache-2.0",
        size="some 100 MB",
        counted="tokenizer",
        note="answers of the model named by --livebench-model; several turns joined",
        fetch=fetch_livebench,
    ),
    Source(
        name="dolphin-r1",
        title="Dolphin-r1, DeepSeek-R1's reasoning",
        origin=DOLPHIN,
        licence="Apache-2.0",
        size="about 13 kB a request",
        counted="tokenizer",
        note="the first --max-rows records; output is the chain of thought and the answer",
        fetch=fetch_dolphin,
    ),
    Source(
        name="osc",
        title="OpenAI summarisation comparisons",
        origin=f"{HUGGING_FACE}/datasets/CarperAI/openai_summarize_comparisons",
        licence="see the dataset's page",
        size="some 100 MB",
        counted="tokenizer",
        note="split test; output is the chosen summary",
        fetch=fetch_osc,
    ),
)


def write_trace(source: Source, rows: list[Row], folder: Path, tokenizer: Path, options: Options) -> Path:
    """Write csv and provenance, each in one rename. Rows without input or output are left out and counted.

    Raises RuntimeError when nothing remains.
    """
    kept = [row for row in rows if row.input_tokens > 0 and row.output_tokens > 0]
    if not kept:
        raise RuntimeError(f"{source.name}: no usable row in {len(rows)}")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{source.stem}.csv"
    temporary = path.with_suffix(".csv.part")
    with temporary.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Row._fields)
        for arrival_s, input_tokens, output_tokens in kept:
            writer.writerow(["" if arrival_s is None else f"{arrival_s:.6f}", input_tokens, output_tokens])
    by_us = source.counted == "tokenizer"
    provenance = {
        "name": source.name,
        "title": source.title,
        "origin": source.origin,
        "licence": source.licence,
        "note": source.note,
        "tokens_counted_by": str(tokenizer) if by_us else source.counted,
        "livebench_model": options.livebench_model if source.name == "livebench" else None,
        "fetched": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "rows": len(kept),
        "rows_left_out": len(rows) - len(kept),
        "mean_input_tokens": round(sum(row.input_tokens for row in kept) / len(kept), 1),
        "mean_output_tokens": round(sum(row.output_tokens for row in kept) / len(kept), 1),
    }
    path.with_suffix(".json").write_text(json.dumps(provenance, indent=2) + "\n")
    temporary.replace(path)
    return path


def load_counter(tokenizer: Path) -> CountTokens:
    """A function from texts to their lengths in tokens. The file is read at the first call."""
    loaded = None

    def count(texts: list[str]) -> list[int]:
        nonlocal loaded
        if loaded is None:
            from tokenizers import Tokenizer

            file = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
            if not file.exists():
                raise RuntimeError(f"no tokenizer at {file}: run scripts/prepare_model.py, or pass --tokenizer")
            loaded = Tokenizer.from_file(str(file))
        return [len(encoding.ids) for encoding in loaded.encode_batch(texts, add_special_tokens=False)]

    return count


def main(argv: list[str] | None = None) -> int:
    names = [source.name for source in SOURCES]
    parser = argparse.ArgumentParser(
        description="Fetch the original request traces and turn each into request lengths.",
        epilog="LiveBench and OSC are in parquet and need pyarrow: pip install pyarrow",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all, or any of {', '.join(names)}")
    parser.add_argument("--list", action="store_true", help="show name, origin, licence and size, and stop")
    parser.add_argument("--tokenizer", type=Path, default=DEFAULT_TOKENIZER, help="counts tokens of text sources")
    parser.add_argument("--max-rows", type=int, default=10_000, help="most requests from a text source")
    parser.add_argument(
        "--livebench-model",
        default="meta-llama-3.1-8b-instruct-turbo",
        help="whose LiveBench answers to take (default: %(default)s)",
    )
    arguments = parser.parse_args(argv)
    wanted = names if "all" in arguments.names else arguments.names
    if unknown := [name for name in wanted if name not in names]:
        parser.error(f"unknown: {', '.join(unknown)}; choose from all, {', '.join(names)}")
    if arguments.list or not wanted:
        for source in SOURCES:
            print(f"{source.name:15} {source.title}\n{'':15} {source.origin}")
            print(f"{'':15} {source.licence}; {source.size}; {source.note}")
        return 0

    options = Options(load_counter(arguments.tokenizer), arguments.max_rows, arguments.livebench_model)
    failed = False
    for source in SOURCES:
        if source.name not in wanted:
            continue
        print(f"{source.name}: {source.origin} ({source.licence}, {source.size})", file=sys.stderr)
        try:
            with tempfile.TemporaryDirectory() as folder:
                rows = source.fetch(options, Path(folder))
            path = write_trace(source, rows, CACHE_DIR / "traces", arguments.tokenizer, options)
            print(path)
        except (OSError, http.client.HTTPException, RuntimeError, ValueError, KeyError) as error:
            failed = True
            print(f"{source.name}: failed: {error}", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
