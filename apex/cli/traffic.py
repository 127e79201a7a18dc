"""Which requests a command sends and when, and how their latencies are shown: `apex bench` and `apex simulate`."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from apex.cli.options import check_output_folder
from apex.cli.output import InputError, number, table
from apex.strategy import StrategyConfig
from swiftllm.files import save_result

if TYPE_CHECKING:
    from rich.table import Table

    from apex.workloads.catalogue import Trace
    from apex.workloads.requests import Lengths

# Title, field and format of columns. Those of the format ``s`` are words.
SERVICE_COLUMNS = (
    ("load", "load", "s"), ("system", "system", "s"), ("tok/s", "output_tokens_per_s", ".1f"),
    ("req/s", "requests_per_s", ".2f"), ("goodput", "goodput_requests_per_s", ".2f"),
    ("TTFT p50", "ttft_s_p50", ".2f"), ("p99 (s)", "ttft_s_p99", ".2f"),
    ("TPOT p50", "tpot_s_p50", ".3f"), ("p99 (s)", "tpot_s_p99", ".3f"), ("failed", "failed", ".0f"),
)  # fmt: skip
GOODPUT_COLUMN = SERVICE_COLUMNS[4]
PLOT_FILES = "service"
AT_ONCE, CONVERSATIONS, RATE_WORDS = "all at once", "turns after answers", " a second"


@dataclass(frozen=True)
class TrafficFlags:
    """Which requests come, and when."""

    workload: Annotated[str | None, tyro.conf.arg(metavar="NAME|FILE")] = None
    """Draw lengths from this workload in place of --input-len and --output-len: a name, such as sharegpt, azure-conv,
    livebench or dolphin-r1, or agents and multi-turn, whose turns follow answers; or a file of your own: CSV or JSON
    lines with arrival_s (seconds, or none), input_tokens and output_tokens; Azure's CSV (TIMESTAMP, ContextTokens,
    GeneratedTokens); Mooncake's JSON lines (timestamp in ms, input_length, output_length, hash_ids); vLLM's custom JSON
    lines (prompt, output_tokens); ShareGPT's JSON; or the JSON that vllm bench serve saves with --save-detailed."""
    trace_dir: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Folder with trace files of named workloads, searched before the cache."""
    tokenizer: Annotated[Path | None, tyro.conf.arg(metavar="FILE|FOLDER")] = None
    """Counts the tokens of a --workload file of texts; by default the model's own, if its folder has one."""
    request_rate: tuple[float, ...] = ()
    """Requests per second, arriving at random (Poisson), one run for each; by default all are there from the start."""
    trace_arrivals: bool = False
    """Add a run in which requests arrive when the file of the workload says."""
    slo_ttft: float | None = None
    """Target: seconds to the first token. Goodput counts the requests that meet both targets; omniserve and sarathi
    plan by them, as by --ttft-slo-s."""
    slo_tpot: float | None = None
    """Target: seconds per output token after the first."""
    plot: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Draw latencies and goodput over the request rate to service.png in this folder, and write service.csv beside."""

    def check_flags(self) -> None:
        """Check the flags before anything runs.

        Raises:
            ValueError: a flag is out of range or has no effect.
            InputError: the folder of --plot cannot be written to.
        """
        for rate in self.request_rate:
            if not 0.0 < rate < math.inf:
                raise ValueError(f"request_rate={rate} must be a positive number")
        for name in ("slo_ttft", "slo_tpot"):
            if (target := getattr(self, name)) is not None and not 0.0 < target < math.inf:
                raise ValueError(f"{name}={target} must be a positive number of seconds")
        for name in ("trace_dir", "tokenizer", "trace_arrivals"):
            if getattr(self, name) and self.workload is None:
                raise ValueError(f"--{name.replace('_', '-')} means nothing without --workload")
        if self.plot is not None and not self.request_rate:
            raise ValueError("--plot draws over the request rate: give --request-rate")
        check_output_folder("--plot", self.plot)

    @property
    def is_service(self) -> bool:
        """Whether requests come one after the other or have lengths of their own, so that latencies are asked for."""
        return self.workload is not None or bool(self.request_rate) or self.has_targets

    @property
    def has_targets(self) -> bool:
        return self.slo_ttft is not None or self.slo_tpot is not None

    def with_targets(self, strategy: StrategyConfig) -> StrategyConfig:
        """The strategies' configuration with the targets that are given here."""
        given = {"ttft_slo_s": self.slo_ttft, "tpot_slo_s": self.slo_tpot}
        return replace(strategy, **{name: target for name, target in given.items() if target is not None})

    def loads(
        self, num_requests: int, input_len: int, output_len: int, seed: int, model: Path | None
    ) -> dict[str, Lengths]:
        """Lengths and arrivals of each run, by the words for its load.

        Args:
            input_len, output_len: sizes of all requests where there is no workload.
            model: folder whose tokenizer counts texts, if it has one.

        Raises:
            ValueError: there is no such workload, its file is damaged, or it has no arrivals of its own.
        """
        from apex.workloads.catalogue import SessionTrace, UniformTrace, load_trace  # other commands need none of it
        from apex.workloads.requests import WorkloadSpec, make_lengths

        trace: Trace = UniformTrace(input_len, output_len, spread=0.0)
        if self.workload is not None:
            own = model if model is not None and (model / "tokenizer.json").is_file() else None
            trace = load_trace(self.workload, self.trace_dir, self.tokenizer or own)
        fixed = {"name": trace.name, "num_requests": num_requests, "seed": seed}
        specs = {
            f"{rate:g}{RATE_WORDS}": WorkloadSpec(**fixed, arrivals="poisson", request_rate=rate)
            for rate in self.request_rate
        }
        if self.trace_arrivals:
            specs["its own arrivals"] = WorkloadSpec(**fixed, arrivals="trace")
        if not specs and isinstance(trace, SessionTrace):
            specs[CONVERSATIONS] = WorkloadSpec(**fixed, arrivals="trace")
        specs = specs or {AT_ONCE: WorkloadSpec(**fixed)}
        return {load: make_lengths(spec, trace) for load, spec in specs.items()}


def service_table(records: Sequence[Mapping[str, Any]], title: str, *, goodput: bool = True) -> Table:
    """Throughput and latencies of every load and system. ``title``: SIMULATED or MEASURED."""
    columns = [column for column in SERVICE_COLUMNS if goodput or column != GOODPUT_COLUMN]
    cells = [[number(record.get(field), form) for _, field, form in columns] for record in records]
    shown = table([name for name, _, _ in columns], cells, left=[name for name, _, form in columns if form == "s"])
    shown.title, shown.title_justify, shown.title_style = title, "left", "bold"
    return shown


def write_service(records: Sequence[Mapping[str, Any]], folder: Path, setting: str, how: str) -> list[Path]:
    """Write service.csv with all figures, and draw service.png. Returns both.

    Args:
        setting: what runs where, for the picture.
        how: SIMULATED or MEASURED; it stands in both files.

    Raises:
        InputError: a file cannot be written.
    """
    from apex.replay.figure import draw_service

    names = list(dict.fromkeys(name for record in records for name in record))
    out = io.StringIO()
    writer = csv.DictWriter(out, ["how", *names], lineterminator="\n")
    writer.writeheader()
    for record in records:
        words = {name: ", ".join(value) if isinstance(value, list) else value for name, value in record.items()}
        writer.writerow({"how": how, **words})
    path = folder / f"{PLOT_FILES}.csv"
    if not save_result(path, out.getvalue()):
        raise InputError(f"--plot: {path} was not written")
    figure = draw_service(records, setting, how)
    picture = path.with_suffix(".png")
    try:
        figure.savefig(picture, dpi=150)
    except OSError as error:
        raise InputError(f"--plot: {picture} was not written ({error.strerror})") from None
    return [picture, path]
