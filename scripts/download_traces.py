#!/usr/bin/env python3
"""Download the original request traces and convert each to request lengths.

    python scripts/download_traces.py                # list them: name, origin, licence, size
    python scripts/download_traces.py azure2023-conv osc
    python scripts/download_traces.py all

Each trace becomes `<name>.csv` and `<name>.json` under `${APEX_CACHE_DIR:-~/.cache/apex}/traces`, where the evaluation
finds them. The CSV has the columns arrival_s (seconds from the first request, empty if the source has no arrivals),
input_tokens and output_tokens. The JSON records the origin and the conversion. No text is kept.

Tokens of texts are counted with --tokenizer, without a chat template. LiveBench and OSC are in parquet and need
pyarrow, which `make setup` installs. A measurement on a GPU fetches the traces of its own workloads first.

The test suite covers the conversions, but not the downloads, since these need the sources' servers.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path

if __name__ == "__main__" and not __package__:  # run as a file
    NEEDS = ("numpy", "pandas", "rich", "tokenizers", "tyro", "yaml")
    import here

from typing import TYPE_CHECKING, Annotated

import tyro

from apex.cli.output import stdout_console
from apex.cli.parser import parse_options
from apex.workloads.catalogue import trace_dirs
from apex.workloads.sources import LIVEBENCH_MODEL, MAX_ROWS, SOURCES, TextOptions, fetch_trace
from evaluation.results.paths import default_model

if TYPE_CHECKING:
    Name = str
else:
    Name = tyro.extras.literal_type_from_choices(["all", *(source.name for source in SOURCES)])


@dataclass(frozen=True)
class Options:
    """Download the original request traces and convert each to request lengths.

    LiveBench and OSC are in parquet and need pyarrow, which `make setup` installs.
    """

    names: Annotated[tyro.conf.Positional[tuple[Name, ...]], tyro.conf.arg(metavar="NAME ...")] = ()
    """Traces to download, or all. Without names, list the traces with origin, licence and size."""
    tokenizer: Path = field(default_factory=default_model)
    """Tokenizer for sources of text: a tokenizer.json or a folder that has one."""
    max_rows: int = MAX_ROWS
    """Maximum number of requests from a source of text."""
    livebench_model: str = LIVEBENCH_MODEL
    """Model whose LiveBench answers to use."""


def main(options: Options) -> int:
    """Download or list. Returns the exit status: 1 if a source failed; the others are still downloaded."""
    wanted = [source for source in SOURCES if {"all", source.name} & set(options.names)]
    if not wanted:
        console = stdout_console()  # exits quietly when the reader of a pipe closes it
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
