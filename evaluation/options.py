"""Options that commands share, as dataclasses for tyro. A field's docstring is its help text."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import tyro
import yaml

from evaluation.results.paths import EXPERIMENTS_DIR, RESULTS_DIR

# Types of options. A command adds a docstring where the text names its own files.
Names = Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="NAME ...")]
Folder = Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")]
File = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]
ResultsDir = Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
FromFolder = Annotated[Folder, tyro.conf.arg(name="from", metavar="FOLDER")]
TraceDir = Annotated[Folder, tyro.conf.arg(help="Folder with trace files, searched before the cache.")]
Range = Annotated[str | None, tyro.conf.arg(metavar="NAME=LOW..HIGH")]


@dataclass(frozen=True)
class RunOptions:
    """Options of every command that runs experiments."""

    LAST_IN_HELP: ClassVar = ("trace_dir", "jobs", "config", "results_dir", "from_folder")

    jobs: int | None = None
    """Simulated points to run in parallel; by default one per usable core. The results do not depend on it."""
    config: File = None
    """Experiment file; by default the command's own in configs/experiments."""
    results_dir: ResultsDir = RESULTS_DIR
    """Results go to <experiment>/<run>/ in this folder. Running the same command again continues an interrupted run."""
    from_folder: FromFolder = None
    """Run nothing; draw and print again from this result folder."""

    def __post_init__(self) -> None:
        check_counts(self, ("jobs",))


@dataclass(frozen=True)
class TraceOptions(RunOptions):
    """Options of experiments that read request traces."""

    trace_dir: TraceDir = None


@dataclass(frozen=True)
class StudyOptions(TraceOptions):
    """Options of every study whose points an experiment file lists."""

    quick: bool = False
    """Few requests, by the file's variant of that name: faster, but mostly filling and draining."""
    set: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FIELD=VALUE ...")] = ()
    """Values in place of the experiment file's, such as seed=1, kernel=native or system=neo,adaptive."""
    only: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FIELD=VALUE ...")] = ()
    """Run only the points with these values, such as case=t4-osc-50,t4-osc-200."""


@dataclass(frozen=True)
class HttpOptions:
    """Options of backend http only."""

    url: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME=URL")] = ()
    """A running server and the name of its system, e.g. vllm=http://127.0.0.1:8000. Repeat for each system.
    Start the server first, e.g. `vllm serve MODEL --port 8000`.
    Give the same server with other flags another name, or its earlier results count as finished.
    Ratios are to the figure's baseline if it is among the names, else to the first name."""
    ready_timeout_s: float = 60.0
    """Seconds to wait for a server to become ready (GET /health)."""
    request_timeout_s: float = 1800.0
    """Seconds after which a request counts as failed."""


def check_counts(options: object, names: Collection[str]) -> None:
    """Check that the options of these names are at least 1, or None.

    Raises:
        ValueError: one is below 1.
    """
    for name in names:
        if (value := getattr(options, name)) is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1")


def experiment_settings(figure: str, config: Path | None = None) -> dict[str, Any]:
    """The experiment file of a figure: sections ``simulated`` and ``torch``."""
    return yaml.safe_load((config or EXPERIMENTS_DIR / f"{figure}.yaml").read_text())


def parse_urls(texts: Sequence[str]) -> dict[str, str]:
    """The addresses of --url by name.

    Raises:
        ValueError: a text is not an address, or two have the same name.
    """
    urls: dict[str, str] = {}
    for text in texts:
        match = re.fullmatch(r"([\w.-]+)=(https?://[^/]+)(/v1)?/?", text)
        if match is None:
            raise ValueError(f"--url {text!r}: write it as NAME=http://HOST:PORT, e.g. vllm=http://127.0.0.1:8000")
        if match[1] in urls:
            raise ValueError(f"--url: two servers have the name {match[1]}; give each a name of its own")
        urls[match[1]] = match[2]
    return urls


def assignments(flag: str, texts: Sequence[str]) -> dict[str, list[Any]]:
    """The values of each field of texts such as ``seed=1`` and ``system=neo,apex``.

    Raises:
        ValueError: a text has another form.
    """
    pairs = [text.partition("=") for text in texts]
    if wrong := ["".join(pair) for pair in pairs if not (pair[0] and pair[2])]:
        raise ValueError(f"{flag} {' '.join(wrong)}: write it as FIELD=VALUE or FIELD=VALUE,VALUE")
    return {name: [plain_value(value) for value in values.split(",")] for name, _, values in pairs}


def plain_value(text: str) -> Any:
    """A number, true, false or none; else the text."""
    words = {"true": True, "false": False, "none": None}
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return words.get(text, text)


def flags(names: Sequence[str]) -> str:
    """Option names as they are typed on the command line."""
    return ", ".join("--" + name.replace("_", "-") for name in names)


def given(**options: object) -> dict[str, object]:
    """The options that are not None."""
    return {name: value for name, value in options.items() if value is not None}
