#!/usr/bin/env python3
"""Fetch the original request traces and turn each into request lengths.

    python scripts/download_traces.py                # lists them: name, origin, licence, size
    python scripts/download_traces.py azure2023-conv osc
    python scripts/download_traces.py all

Each trace becomes `<name>.csv` with the columns arrival_s (seconds from the first request, empty where the source has
no arrivals), input_tokens and output_tokens, and `<name>.json` that says where it came from and how it was made,
under `${APEX_CACHE_DIR:-~/.cache/apex}/traces`, where the evaluation finds them. No text is kept.

Texts are counted with --tokenizer, without a chat template. LiveBench and OSC are in parquet and need one more package:
`pip install pyarrow`.

The conversions are covered by the test suite; the downloads themselves are not, since they need the sources' servers.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

if str(Path(__file__).resolve().parent.parent) not in sys.path:  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tyro

from apex.cli.output import stdout_console
from apex.cli.parser import parse_options
from evaluation.results.paths import default_model, trace_dirs
from evaluation.traces.sources import SOURCES, TextOptions, fetch_trace

if TYPE_CHECKING:
    Name = str
else:
    Name = tyro.extras.literal_type_from_choices(["all", *(source.name for source in SOURCES)])


@dataclass(frozen=True)
class Options:
    """Fetch the original request traces and turn each into request lengths.

    LiveBench and OSC are in parquet and need pyarrow: pip install pyarrow
    """

    names: Annotated[tyro.conf.Positional[tuple[Name, ...]], tyro.conf.arg(metavar="NAME ...")] = ()
    """Traces to fetch, or all. Without a name they are listed: origin, licence, size."""
    tokenizer: Path = field(default_factory=default_model)
    """Counts the tokens of text: a tokenizer.json or a folder that has one."""
    max_rows: int = 10_000
    """Most requests from a source of text."""
    livebench_model: str = "meta-llama-3.1-8b-instruct-turbo"
    """Whose LiveBench answers to take."""


def main(options: Options) -> int:
    """Fetch or list. Returns the exit status: 1 when a source failed; the others are fetched nevertheless."""
    wanted = [source for source in SOURCES if {"all", source.name} & set(options.names)]
    if not wanted:
        console = stdout_console()  # ends quietly where what it is piped into has seen enough
        for source in SOURCES:
            about = (source.title, source.origin, f"{source.licence}; {source.size}; {source.note}")
            text = f"{source.name:15} " + f"\n{'':16}".join(about)
            console.print(text, markup=False, soft_wrap=True)
        return 0
    text = TextOptions(options.tokenizer, options.max_rows, options.livebench_model)
    failed = False
    for source in wanted:
        print(f"{source.name}: {source.origin} ({source.licence}, {source.size})", file=sys.stderr)
        try:
            print(fetch_trace(source, text, trace_dirs()[0]))
        except (OSError, HTTPException, RuntimeError, ValueError, KeyError) as error:
            failed = True
            print(f"{source.name}: failed: {error}", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(parse_options(Options, prog="scripts/download_traces.py")))
