"""The published request traces: address, licence, and how each is fetched."""

from __future__ import annotations

import datetime
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from evaluation.traces.conversions import azure_rows, dolphin_pairs, livebench_pairs, neo_rows, text_rows, token_counter
from evaluation.traces.downloads import HUGGING_FACE, download, open_url, read_parquet
from evaluation.traces.files import TraceRow, write_rows

GITHUB = "https://raw.githubusercontent.com"
AZURE = f"{GITHUB}/Azure/AzurePublicDataset/master/data"
LIVEBENCH_CATEGORIES = ("reasoning", "math", "coding", "language", "data_analysis", "instruction_following")
DOLPHIN = f"{HUGGING_FACE}/datasets/cognitivecomputations/dolphin-r1/resolve/main/dolphin-r1-reasoning-deepseek.jsonl"

# The 2024 week has 27 million requests. One in 1,000 preserves the distribution of lengths and the daily pattern of
# arrivals, though not their burstiness, in a file as small as that of the 2023 hour.
AZURE_2024_STRIDE = 1000


@dataclass(frozen=True)
class TextOptions:
    """Options for sources of text."""

    tokenizer: Path
    """Counts the tokens: a tokenizer.json or a folder that has one."""
    max_rows: int
    livebench_model: str
    """Model whose answers are the outputs of LiveBench."""


def fetch_dolphin(options: TextOptions, folder: Path) -> Iterator[tuple[str, str]]:
    # The whole file is 3.8 GB. It is read line by line, and closed after the last wanted row.
    with open_url(DOLPHIN) as response:
        yield from dolphin_pairs(response)


def fetch_livebench(options: TextOptions, folder: Path) -> Iterator[tuple[str, str]]:
    import pandas as pd

    columns = ["question_id", "turns"]
    questions = [read_parquet(f"livebench/{name}", "test", columns, folder) for name in LIVEBENCH_CATEGORIES]
    columns = ["question_id", "model_id", "choices"]
    answers = read_parquet("livebench/model_answer", "leaderboard", columns, folder)
    yield from livebench_pairs(pd.concat(questions, ignore_index=True), answers, options.livebench_model)


def fetch_osc(options: TextOptions, folder: Path) -> Iterator[tuple[str, str]]:
    frame = read_parquet("CarperAI/openai_summarize_comparisons", "test", ["prompt", "chosen"], folder)
    yield from zip(frame["prompt"], frame["chosen"], strict=True)


@dataclass(frozen=True, kw_only=True)
class Source(ABC):
    """A published trace."""

    name: str
    title: str
    origin: str
    licence: str
    size: str
    note: str
    counted: str | None = None
    """Tokenizer of the published lengths; None if tokens are counted here."""
    has_arrivals: bool = False

    @property
    def file(self) -> str:
        """Name of the trace file, as in workloads.yaml."""
        return f"{self.name.replace('-', '_')}.csv"

    @abstractmethod
    def rows(self, options: TextOptions, folder: Path) -> list[TraceRow]:
        """Fetch the trace, with ``folder`` for temporary files. Raises as :func:`fetch_trace`."""


@dataclass(frozen=True, kw_only=True)
class LengthSource(Source):
    """A published file of lengths."""

    convert: Callable[[Path], list[TraceRow]]

    def rows(self, options: TextOptions, folder: Path) -> list[TraceRow]:
        download(self.origin, folder / "original")
        return self.convert(folder / "original")


@dataclass(frozen=True, kw_only=True)
class TextSource(Source):
    """Published texts, whose tokens are counted here."""

    fetch_pairs: Callable[[TextOptions, Path], Iterator[tuple[str, str]]]

    def rows(self, options: TextOptions, folder: Path) -> list[TraceRow]:
        count_tokens = token_counter(options.tokenizer)
        with closing(self.fetch_pairs(options, folder)) as pairs:
            return text_rows(pairs, count_tokens, options.max_rows)


AZURE_COUNTS = "Azure's own, tokenizer not stated"

SOURCES: tuple[Source, ...] = (
    LengthSource(
        name="azure2023-conv",
        title="Azure conversation, one hour of November 2023 (Splitwise, ISCA'24)",
        origin=f"{AZURE}/AzureLLMInferenceTrace_conv.csv",
        licence="CC-BY-4.0",
        size="1 MB",
        note="every request",
        has_arrivals=True,
        counted=AZURE_COUNTS,
        convert=azure_rows,
    ),
    LengthSource(
        name="azure2023-code",
        title="Azure code completion, one hour of November 2023 (Splitwise, ISCA'24)",
        origin=f"{AZURE}/AzureLLMInferenceTrace_code.csv",
        licence="CC-BY-4.0",
        size="0.3 MB",
        note="every request",
        has_arrivals=True,
        counted=AZURE_COUNTS,
        convert=azure_rows,
    ),
    LengthSource(
        name="azure2024-conv",
        title="Azure conversation, one week of May 2024 (DynamoLLM, HPCA'25)",
        # The address really has "infererence".
        origin="https://azurepublicdatasettraces.blob.core.windows.net/azurellminfererencetrace/"
        "AzureLLMInferenceTrace_conv_1week.csv",
        licence="CC-BY-4.0",
        size="1.1 GB",
        note=f"one request in {AZURE_2024_STRIDE}, so the arrival rate is {AZURE_2024_STRIDE} times lower",
        has_arrivals=True,
        counted=AZURE_COUNTS,
        convert=functools.partial(azure_rows, stride=AZURE_2024_STRIDE),
    ),
    TextSource(
        name="livebench",
        title="LiveBench questions with a model's recorded answers",
        origin=f"{HUGGING_FACE}/livebench",
        licence="Apache-2.0",
        size="some 100 MB",
        note="answers of the model named by --livebench-model; several turns joined",
        fetch_pairs=fetch_livebench,
    ),
    TextSource(
        name="dolphin-r1",
        title="Dolphin-r1, DeepSeek-R1's reasoning",
        origin=DOLPHIN,
        licence="Apache-2.0",
        size="about 13 kB a request",
        note="the first --max-rows records; output is the chain of thought and the answer",
        fetch_pairs=fetch_dolphin,
    ),
    TextSource(
        name="osc",
        title="OpenAI summarisation comparisons",
        origin=f"{HUGGING_FACE}/datasets/CarperAI/openai_summarize_comparisons",
        licence="see the dataset's page",
        size="some 100 MB",
        note="split test; output is the chosen summary",
        fetch_pairs=fetch_osc,
    ),
    LengthSource(
        name="osc-neo-llama2",
        title="OpenAI summarisation comparisons, the lengths that NEO's artifact replays (MLSys'25)",
        origin=f"{GITHUB}/NEO-MLSys25/NEO/HEAD/evaluation/data/osc-Llama-2-7b-hf.json",
        licence="Apache-2.0",
        size="0.1 MB",
        note="every request; used where osc was not fetched",
        counted="Llama-2's, by the name of the file",
        convert=neo_rows,
    ),
)


def fetch_trace(source: Source, options: TextOptions, folder: Path) -> Path:
    """Fetch a trace into ``folder``, with its provenance. Rows without input or output are dropped and counted.

    Raises:
        OSError, http.client.HTTPException: the download failed.
        RuntimeError: something is missing here or at the source, or no row remains; the message says what to do.
        ValueError, KeyError: the format of the source has changed.
    """
    with TemporaryDirectory() as scratch:
        rows = source.rows(options, Path(scratch))
    kept = [row for row in rows if row.input_tokens > 0 and row.output_tokens > 0]
    if not kept:
        raise RuntimeError(f"no usable row in {len(rows)}")
    provenance = {
        "name": source.name,
        "title": source.title,
        "origin": source.origin,
        "licence": source.licence,
        "note": source.note,
        "tokens_counted_by": source.counted or str(options.tokenizer),
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
