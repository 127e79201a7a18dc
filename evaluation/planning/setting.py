"""A paper's setting on this machine: which panels apply, their model, pools and dtype, their traces."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import try_to_load_from_cache
from rich.console import Console

from apex.simulator.hardware_files import MODELS_DIR, load_host
from apex.simulator.paper_settings import BLOCK_SIZE, PaperSetting, gpu_kind, load_setting, nearest_setting
from apex.workloads.catalogue import fetchable, load_catalogue, trace_dirs
from apex.workloads.sources import LIVEBENCH_MODEL, MAX_ROWS, Source, TextOptions, fetch_trace
from evaluation.grid import Grid, Panel, setting_of, values_of, workload_of
from evaluation.measure.processes import Child, ChildHung
from evaluation.results.paths import default_model, python_command
from evaluation.results.progress import print_line
from evaluation.results.provenance import model_identity
from evaluation.studies.papers import FigureOptions
from swiftllm.config import EngineConfig
from swiftllm.files import cache_dir, is_kept, keep, write_atomically
from swiftllm.machine import GIB, Card, InsufficientMemory
from swiftllm.model.config import ModelConfig
from swiftllm.model.folder import HUB_NAME, DamagedFile, model_folder, weight_files
from swiftllm.runtime.execution_context import resolve_residual_dtype
from swiftllm.runtime.memory import MemoryBudget, blocks_in
from swiftllm.runtime.memory_estimate import estimate_memory

# -- panels that apply here -------------------------------------------------------------------------------------------

SAME_MEMORY = 0.15
"""Relative difference of host memory within which a host is taken for one of the papers'."""

REHEARSED_REQUESTS = 32
REHEARSAL_SCALE = 0.1
"""Factor for the lengths of a rehearsal."""
REHEARSAL_FASTER = 100.0
"""Factor for the request rates of a rehearsal."""


Paper = Literal["apex", "neo"]


class NotApplicable(ValueError):
    """The figure has no panel for this machine; the message says which it has."""


def panels_here(grid: Grid, wanted: str | None, card: Card | None, paper: Paper) -> Grid:
    """The grid with the panels to measure on this machine.

    With ``wanted``, those of the same GPU as that setting, in that setting. Else those of the card's kind, and on a
    card that no paper used those of the nearest setting.

    Raises:
        NotApplicable: there is no such panel.
    """
    panels = measurable(grid)
    if wanted is not None:
        gpu = load_setting(wanted).gpu
    else:
        gpu = gpu_kind(card.name)
        if gpu not in {load_setting(panel["setting"]).gpu for panel in grid.panels}:
            gpu = load_setting(nearest_setting(gpu, card.total_bytes, paper)).gpu
    chosen = [panel for panel in panels if load_setting(panel["setting"]).gpu == gpu]
    if not chosen:
        there = ", ".join(sorted({panel["setting"] for panel in panels})) or "machines with several GPUs alone"
        of_what = wanted or f"{card.name}, {card.total_bytes / GB:.0f} GB"
        raise NotApplicable(f"the figure has no panel for {of_what}; it has {there}")
    here = Grid(tuple(chosen))
    return here if wanted is None else here.with_(setting=wanted)


def on_hosts_here(grid: Grid, host_bytes: int) -> Grid:
    """The grid with those of the papers' hosts that have as much memory as this machine.

    Raises:
        NotApplicable: no panel is left.
    """
    panels = []
    for panel in grid.panels:
        hosts = [host for host in values_of(panel, "host") if has_memory(host, host_bytes)]
        if hosts or "host" not in panel:
            panels.append({**panel, "host": hosts} if hosts else panel)
    if not panels:
        raise NotApplicable(f"the figure has no panel for a host of {host_bytes / GB:.0f} GB")
    return Grid(tuple(panels))


def has_memory(host: str, num_bytes: int) -> bool:
    return abs(num_bytes / (load_host(host)["memory_gb"] * GB) - 1.0) < SAME_MEMORY


def panels_for_rehearsal(grid: Grid) -> Grid:
    """All panels of single cards: the ends of their sweeps, few short requests at high rates, one host."""
    panels: dict[tuple[str, str], Panel] = {}
    for panel in measurable(grid):
        few: dict[str, Any] = {
            "num_requests": min(panel["num_requests"], REHEARSED_REQUESTS),
            "scale": REHEARSAL_SCALE,
            "request_rate": [rate * REHEARSAL_FASTER for rate in ends(values_of(panel, "request_rate"))],
            "output_len": ends(values_of(panel, "output_len")),
            "host": values_of(panel, "host")[:1],
        }
        few = {name: value for name, value in few.items() if value}
        panels.setdefault((panel["panel"], workload_of(panel)), {**panel, **few})
    if not panels:
        raise NotApplicable("the figure has panels for machines with several GPUs alone")
    return Grid(tuple(panels.values()))


def measurable(grid: Grid) -> list[Panel]:
    """The panels whose settings need no more GPUs than the one that an engine uses, each machine once.

    Other readings of a machine assume another speed of CPU attention, which a measurement has by itself.
    """
    settings = {panel["setting"]: load_setting(panel["setting"]) for panel in grid.panels}
    kept = {name for name, setting in settings.items() if setting.tensor_parallel == 1 and setting.like is None}
    return [panel for panel in grid.panels if panel["setting"] in kept]


def ends(values: Sequence[float]) -> list[float]:
    return list(dict.fromkeys((*values[:1], *values[-1:])))


# -- model, pools and dtype -------------------------------------------------------------------------------------------

GB = 1e9
USABLE_SHARE = 0.97
"""Of a card's memory as nvidia-smi reports it: the driver keeps the rest."""
Pools = Literal["papers", "card", "chosen"]
"""Where the number of GPU blocks comes from: the paper, all that the card holds, or the command line."""
TINY_SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Sizes of a rehearsal's model. Its number of KV heads follows from the ratio of heads in the setting's model."""
TINY_CPU_BLOCKS = 20_000


@dataclass(frozen=True)
class LocalSetting:
    """A paper's setting as this machine runs it. ``differences`` are its deviations from the paper, in words.

    ``papers_model``: whether the model has the shape of the paper's.
    """

    paper: PaperSetting
    title: str
    pools: Pools
    card: Card | None
    weights: Literal["checkpoint", "dummy"]
    papers_model: bool
    engine: EngineConfig
    fit: MemoryBudget
    differences: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.paper.name

    def row(self) -> dict[str, Any]:
        """Fields of the summary rows of this setting's points."""
        blocks = self.engine.num_cpu_blocks
        return {
            "setting": self.name,
            "setting_title": self.title,
            "setting_origin": self.pools,
            "weights": self.weights,
            "papers_model": self.papers_model,
            "max_gpu_blocks": self.fit.max_gpu_blocks,
            "cpu_kv_gb": round(blocks * self.fit.bytes_per_block / GB, 1),
            "max_model_len": self.engine.max_model_len,
        }

    @property
    def identity(self) -> dict[str, Any]:
        """The setting for the identity of a run: everything that decides its numbers."""
        return {
            "title": self.title,
            "pools": self.pools,
            "card": None if self.card is None else asdict(self.card),
            "weights": self.weights,
            "model": model_identity(Path(self.engine.model)),
            "engine": {name: value for name, value in asdict(self.engine).items() if name != "model"},
            "differences": list(self.differences),
        }


def local_setting(paper: PaperSetting, card: Card | None, host_bytes: int, options: FigureOptions) -> LocalSetting:
    """The setting on a machine with this card and this much available host memory.

    Raises:
        ValueError: it does not fit; the message holds the numbers. Or an option is not valid here.
        FileNotFoundError: the model that was named is not to be had.
    """
    card = None if options.device == "cpu" or options.rehearse else card
    model, weights, model_words = _model(paper, options)
    shape = ModelConfig.from_folder(model)
    dtype = _dtype(paper, card, options)
    limits = paper.limits
    max_tokens = options.max_num_batched_tokens or limits.max_num_batched_tokens
    engine = EngineConfig(
        str(model),
        "cpu" if card is None else "cuda",
        dtype,
        "auto" if weights == "checkpoint" else "dummy",
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=max_tokens,
        max_num_seqs=min(limits.max_num_seqs, max_tokens),
        max_model_len=min(limits.max_model_len, shape.max_position_embeddings),
        enable_prefix_caching=False,
        gpu_batch_threads=1,  # without a GPU the GPU batch takes the GPU's part, so it has the same size in all systems
        cpu_threads=options.cpu_threads,
        cpu_kernel=options.cpu_kernel,
    )
    card_bytes = None if card is None else int(USABLE_SHARE * card.total_bytes)
    sizes = {"device_bytes": card_bytes, "host_bytes": host_bytes}
    dtypes = getattr(torch, dtype), resolve_residual_dtype(str(model), getattr(torch, dtype))
    fit = estimate_memory(engine, shape, dtypes[0], residual_dtype=dtypes[1], **sizes)
    is_own_card = card is None or gpu_kind(card.name) == paper.gpu
    pools: Pools = "card" if options.all_gpu_blocks or not is_own_card else "papers"
    pools = "chosen" if options.num_gpu_blocks else pools
    gpu_blocks = options.num_gpu_blocks or (fit.max_gpu_blocks if pools == "card" else paper.num_gpu_blocks)
    wanted_cpu_blocks = _cpu_blocks(paper, options, fit.bytes_per_block)
    left_for_cpu = max(0, fit.max_cpu_blocks - (gpu_blocks if card is None else 0))
    if wanted_cpu_blocks <= left_for_cpu:
        cpu_blocks = wanted_cpu_blocks
    else:
        longest = -(-engine.max_model_len // BLOCK_SIZE)
        cpu_blocks = max(_steady_blocks(left_for_cpu), min(longest, left_for_cpu))
    try:
        fit.check(gpu_blocks, cpu_blocks)
    except InsufficientMemory as error:
        raise ValueError(f"setting {paper.name} does not fit here: {error}") from None
    for_all_else = max(fit.host_headroom_bytes, host_bytes - left_for_cpu * fit.host_block_bytes)
    in_host = f"of {host_bytes / GIB:.1f} GiB available {for_all_else / GIB:.1f} are for all else"
    pools_with_remedy = (
        ("the GPU pool", gpu_blocks, "give more --num-gpu-blocks"),
        ("host memory", cpu_blocks, f"{in_host}; end other programs, or take a machine with more memory"),
    )
    for where, blocks, remedy in pools_with_remedy:
        if blocks * BLOCK_SIZE < engine.max_model_len:
            raise ValueError(
                f"setting {paper.name} does not fit here: {where} has room for {blocks * BLOCK_SIZE:,} tokens of KV "
                f"cache, and its longest request has {engine.max_model_len:,}; {remedy}"
            )
    differences = list(model_words)
    if card is None:
        differences.append("the CPU computes the linear layers: there is no GPU")
    elif not is_own_card:
        differences.append(f"{card.name} instead of the paper's GPU, with the {gpu_blocks:,} KV blocks that it holds")
    elif gpu_blocks != paper.num_gpu_blocks:
        differences.append(f"{gpu_blocks:,} GPU blocks instead of {paper.num_gpu_blocks:,}")
    if cpu_blocks < wanted_cpu_blocks:
        here_gb = cpu_blocks * fit.bytes_per_block / GB
        differences.append(f"{here_gb:.0f} GB of KV cache in host memory instead of {paper['cpu_kv_gb']:g} GB")
    if max_tokens != limits.max_num_batched_tokens:
        differences.append(f"{max_tokens:,} tokens per iteration instead of {limits.max_num_batched_tokens:,}")
    return LocalSetting(
        paper,
        _title(paper, card, options),
        pools,
        card,
        weights,
        options.model is None and options.num_layers is None and not options.rehearse,
        replace(engine, num_gpu_blocks=gpu_blocks, num_cpu_blocks=cpu_blocks),
        fit,
        tuple(differences),
    )


def _title(paper: PaperSetting, card: Card | None, options: FigureOptions) -> str:
    """The title in figures: the paper's on its own card, else this machine's device."""
    model = paper.title.split(" (")[0].partition(" + ")[2]
    if options.rehearse:
        return f"{paper.title.split(' + ')[0]} rehearsal"
    if options.num_layers is not None:
        model += f", {options.num_layers} layers"
    if card is None:
        return f"CPU + {model}"
    short = card.name.removeprefix("NVIDIA ").removeprefix("Tesla ").removeprefix("GeForce ")
    return f"{short} + {model}"


def _cpu_blocks(paper: PaperSetting, options: FigureOptions, bytes_per_block: int) -> int:
    """Blocks of the CPU tier. Fewer layers keep the paper's number: its gigabytes would be most of a small machine."""
    if options.rehearse:
        return TINY_CPU_BLOCKS
    if options.num_layers is not None:
        return paper.num_cpu_blocks
    return blocks_in(paper["cpu_kv_gb"] * GB, bytes_per_block)


def _steady_blocks(most: int) -> int:
    """A number of blocks below ``most`` that seldom changes while free memory varies by a percent or two.

    An interrupted run with other pools would not be found again: they are part of its identity.
    """
    steady = int(0.95 * most)
    step = 1 << max(0, steady.bit_length() - 4)
    return steady // step * step


def _dtype(paper: PaperSetting, card: Card | None, options: FigureOptions) -> str:
    dtype = paper.dtype if options.dtype in (None, "auto") else options.dtype
    if dtype == "bfloat16" and card is not None and card.capability < (8, 0):
        raise ValueError(f"{card.name} has no bfloat16: use --dtype float16")
    return dtype


def _model(paper: PaperSetting, options: FigureOptions) -> tuple[Path, Literal["checkpoint", "dummy"], tuple[str, ...]]:
    """Folder of the model, its weights, and how it differs from the paper's.

    A checkpoint is downloaded only where the command line names it: it has 13 GB and more, and may need a licence.
    """
    if options.rehearse:
        return _shape_folder(paper.model, "tiny", TINY_SHAPE), "dummy", ("a tiny random model",)
    if options.num_layers is not None:
        name = f"{options.num_layers}-layers"
        folder = _shape_folder(paper.model, name, {"num_hidden_layers": options.num_layers})
        return folder, "dummy", (f"{options.num_layers} layers of the model, with random weights",)
    if options.model is not None:
        dummy = options.load_format == "dummy"
        folder = model_folder(str(options.model), weights=not dummy)
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(f"no model in {folder}: give --model a Hugging Face folder or a hub name")
        return folder, "dummy" if dummy else "checkpoint", (f"the model {options.model}",)
    cached = try_to_load_from_cache(paper.hub_name, "config.json")
    if isinstance(cached, str) and options.load_format != "dummy" and _is_complete(Path(cached).parent):
        return Path(cached).parent, "checkpoint", ()
    return MODELS_DIR / paper.model, "dummy", ("random weights",)


def _is_complete(folder: Path) -> bool:
    """Whether all weights of a checkpoint are there. A download may have been interrupted."""
    try:
        return bool(weight_files(folder))
    except (OSError, DamagedFile):
        return False


def _shape_folder(model: str, name: str, changes: dict[str, Any]) -> Path:
    """A folder in the cache with the configuration of ``model`` and some other sizes."""
    config = json.loads((MODELS_DIR / model / "config.json").read_text())
    if "num_attention_heads" in changes:
        heads_per_kv_head = config["num_attention_heads"] // config["num_key_value_heads"]
        changes = {**changes, "num_key_value_heads": max(1, changes["num_attention_heads"] // heads_per_kv_head)}
    folder = cache_dir() / "shapes" / f"{model}-{name}"
    write_atomically(folder / "config.json", json.dumps({**config, **changes}, indent=1) + "\n")
    return folder


# -- traces -----------------------------------------------------------------------------------------------------------

FAILED = ".failed"
"""Suffix of the file that remembers a trace which could not be fetched."""


def fetch_traces(grid: Grid, options: FigureOptions, console: Console) -> None:
    """Fetch the traces of a grid's workloads that are not there yet; say which could not be had.

    Such a workload is drawn from its quantile tables, which the ``trace_origin`` of its rows says. A failure is
    remembered: traces are part of a run's identity, and an interrupted run is to be found again.
    """
    places = {place["workload"]: place for place in grid.places() if place.get("workload") in load_catalogue()}
    for workload, place in places.items():
        text = TextOptions(tokenizer_of(setting_of(place), options), MAX_ROWS, LIVEBENCH_MODEL)
        _fetch_one(workload, text, options.trace_dir, console)


def tokenizer_of(paper: PaperSetting, options: FigureOptions) -> Path:
    """The folder whose tokenizer counts texts: the measured model's where it is there, else the default model's."""
    model = options.model or Path(paper.hub_name)
    if (model / "tokenizer.json").is_file():
        return model
    cached = try_to_load_from_cache(str(model), "tokenizer.json") if HUB_NAME.fullmatch(str(model)) else None
    return Path(cached).parent if isinstance(cached, str) else default_model()


def _fetch_one(workload: str, text: TextOptions, trace_dir: Path | None, console: Console) -> None:
    files = [entry["file"] for entry in load_catalogue()[workload]["sources"] if entry["kind"] == "measured"]
    if any(is_kept(folder / file) for folder in trace_dirs(trace_dir) for file in files):
        return
    (folder,) = trace_dirs()
    for source in sorted(fetchable(workload), key=lambda source: files.index(source.file)):
        remembered = folder / (source.file + FAILED)
        if is_kept(remembered):
            reason = f"it failed before: {remembered.read_text().strip()}"
        else:
            print_line(console, f"fetching {source.name} ({source.licence}, {source.size}) from {source.origin}")
            try:
                path = fetch_apart(source, text, folder)
                print_line(console, f"  {path}, a trace of {workload}")
                return
            except (OSError, RuntimeError, ValueError, KeyError) as error:
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                keep(remembered, reason + "\n")
        print_line(console, f"not fetched: {source.name}: {reason}", "yellow")
    print_line(
        console,
        f"{workload} is drawn from quantile tables, and its rows say so (trace_origin). To fetch it: "
        f"{_command(fetchable(workload), text)}",
        "yellow",
    )


def _command(sources: Iterable[Source], text: TextOptions) -> str:
    names = " ".join(source.name for source in sources)
    own = "" if text.tokenizer == default_model() else f" --tokenizer {text.tokenizer}"
    return f"{python_command()} scripts/download_traces.py {names}{own}"


# -- a trace is fetched in a process of its own ------------------------------------------------------------------------

FETCH_S = 600.0
"""Seconds for a trace: the largest has 1.1 GB, and AWS instances read tens of MB/s. What takes longer is given up."""


def fetch_apart(source: Source, text: TextOptions, folder: Path, limit_s: float = FETCH_S) -> Path:
    """Fetch a trace in a process of its own, which is killed after ``limit_s`` seconds: a name server or a slow sender
    may hold it longer than any timeout of a read.

    Raises:
        TimeoutError: it took longer.
        RuntimeError: the process died, or as :func:`~apex.workloads.sources.fetch_trace`.
        OSError, ValueError, KeyError: as there.
    """
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        child = Child("the download's process")
        stack.callback(child.stop)
        try:
            return child.call(_fetch_there, source, text, folder, scratch, limit_s=limit_s)
        except ChildHung:
            raise TimeoutError(f"it took longer than {limit_s:g} s") from None


def _fetch_there(source: Source, text: TextOptions, folder: Path, scratch: str) -> Path:
    tempfile.tempdir = scratch  # which the parent removes, however this process ends
    try:
        return fetch_trace(source, text, folder)
    except (OSError, HTTPException) as error:  # some cannot be sent to another process
        raise ConnectionError(str(error) or type(error).__name__) from None
