"""A figure measured with a small model, or on servers: its workloads, scaled down to this machine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apex.workloads.requests import Lengths
from evaluation.experiments.grid import Grid
from evaluation.experiments.http_point import HttpTask
from evaluation.experiments.identity import identity
from evaluation.experiments.options import experiment_settings, flags, given, parse_urls
from evaluation.experiments.papers.options import SERVER_DECIDES, FigureOptions
from evaluation.experiments.places import REQUESTS, lengths_of, workload_of
from evaluation.experiments.runner import Point
from evaluation.experiments.torch_point import TorchTask
from evaluation.results.paths import model_folder
from evaluation.results.provenance import cpu_kernels, model_identity
from swiftllm.config import EngineConfig
from swiftllm.systems import find_system

if TYPE_CHECKING:
    from evaluation.measure.server import Server

NOTES = ("system", "baseline", "repeats", "pool", "engine")


def small_points(figure: str, options: FigureOptions) -> tuple[list[Point], dict[str, Any]]:
    """The points of the ``torch`` section of an experiment file, and what decides their numbers.

    The systems of one workload run one after the other, so that slow drift affects them alike. Servers are asked for
    their model.

    Raises:
        ValueError: an option is not valid here; the message says what to do.
        ServerNotReady: a server does not answer; the message says what to start.
    """
    section = experiment_settings(figure, options.config)["torch"]
    grid = Grid.read(section, {"panel", *REQUESTS}, notes=NOTES).only("workload", options.workloads, workload_of)
    changes = given(num_requests=options.num_requests, scale=options.scale, trace_dir=options.trace_dir)
    grid = with_output_lens(grid.with_(**changes, seed=options.seed), options.output_lens)
    servers = connect_servers(options) if options.backend == "http" else {}
    systems = tuple(servers) or options.systems or tuple(section["system"])
    baseline = systems[0] if servers and section["baseline"] not in systems else section["baseline"]
    for system in systems if not servers else ():
        find_system(system)
    engine = engine_config(section["engine"], options)
    gpu_requests = options.gpu_requests or section["pool"]["gpu_requests"]
    repeats = options.repeats or section["repeats"]

    def task(system: str, lengths: Lengths, values: Mapping[str, Any]) -> TorchTask | HttpTask:
        if system in servers:
            limits = (options.stall_timeout_s, options.request_timeout_s, None, options.ready_timeout_s)
            return HttpTask(servers[system], Path(engine.model), lengths, values, *limits)
        pools = with_pools(engine, lengths, gpu_requests)
        return TorchTask(system, pools, lengths, {**values, "gpu_requests": gpu_requests}, options.stall_timeout_s)

    points = []
    for place in grid.places():
        lengths, rate = lengths_of(place), place.get("request_rate")
        swept = {"out": place.get("output_len"), "rate": rate}
        group = "-".join([lengths.spec.name, *(f"{tag}{at:g}" for tag, at in swept.items() if at is not None)])
        label = f"{lengths.spec.name}, {lengths.mean_output_tokens:.0f} output tokens"
        label += "" if rate is None else f", {rate:g} requests/s"
        for repeat in range(repeats):
            first = repeat % len(systems)  # otherwise one system would always be measured first
            for system in systems[first:] + systems[:first]:
                key = f"{group}-{system}" + (f"-{repeat}" if repeats > 1 else "")
                made = task(system, lengths, {"panel": place["panel"], "baseline": baseline})
                points.append(Point(key, f"{group}-{system}", f"{label}, {system}", made))
    configuration = {
        "model": model_identity(Path(engine.model)),
        "repeats": repeats,
        **({} if servers else {"cpu_kernels": cpu_kernels(), "gpu_requests": gpu_requests}),
        "points": identity(points),
    }
    return points, configuration


def with_output_lens(grid: Grid, output_lens: Sequence[float] | None) -> Grid:
    """The grid with other average output lengths, where a panel sweeps these."""
    if output_lens is None:
        return grid
    swept = {"output_len": list(output_lens)}
    return Grid(tuple({**panel, **swept} if panel.get("output_len") else panel for panel in grid.panels))


def engine_config(fields: Mapping[str, Any], options: FigureOptions) -> EngineConfig:
    """The engine of measured points.

    Raises:
        ValueError: there is no model; the message says what to do.
    """
    names = ("num_gpu_blocks", "device", "dtype", "load_format", "cpu_threads", "cpu_kernel")
    chosen = given(**{name: getattr(options, name) for name in names})
    # Without a GPU the GPU batch takes the GPU's part, so it has the same size in all systems. The papers' systems have
    # no prefix cache, and in one that has it a repeated run would not compute its prompts.
    same = {"gpu_batch_threads": 1, "enable_prefix_caching": False}
    return EngineConfig(str(model_folder(options.model)), **{**same, **fields, **chosen})


def pool_blocks(lengths: Lengths, gpu_requests: int, block_size: int) -> tuple[int, int]:
    """Numbers of GPU and CPU blocks for a workload.

    The GPU pool holds ``gpu_requests`` requests of average length, and at least the longest one. The CPU pool
    holds all requests at once.
    """
    blocks = [math.ceil((row.input_tokens + row.output_tokens) / block_size) for row in lengths.rows]
    mean = math.ceil(sum(blocks) / len(blocks))
    return max(gpu_requests * mean, max(blocks)), 1 << (sum(blocks) - 1).bit_length()


def with_pools(engine: EngineConfig, lengths: Lengths, gpu_requests: int) -> EngineConfig:
    """``engine`` with pool sizes from :func:`pool_blocks` where it has none."""
    gpu_blocks, cpu_blocks = pool_blocks(lengths, gpu_requests, engine.block_size)
    return replace(
        engine,
        num_gpu_blocks=gpu_blocks if engine.num_gpu_blocks is None else engine.num_gpu_blocks,
        num_cpu_blocks=cpu_blocks if engine.num_cpu_blocks is None else engine.num_cpu_blocks,
    )


def connect_servers(options: FigureOptions) -> dict[str, Server]:
    """The servers of --url by name, ready to be measured.

    Raises:
        ValueError: an option is not valid here; the message says what is.
        ServerNotReady: a server does not answer; the message says what to start.
    """
    from evaluation.measure.server import connect_server  # the HTTP client is needed only here

    if not options.url:
        raise ValueError("--backend http needs a running server: --url NAME=http://127.0.0.1:8000")
    if unfit := [name for name in SERVER_DECIDES if getattr(options, name) is not None]:
        raise ValueError(
            f"{flags(unfit)}: with --backend http the server decides this; give it when you start the server"
        )
    urls = parse_urls(options.url)
    if unknown := set(options.systems or ()) - set(urls):
        raise ValueError(
            f"--systems {' '.join(sorted(unknown))}: give the server's address, --url NAME=http://HOST:PORT"
        )
    return {name: connect_server(name, urls[name], options.ready_timeout_s) for name in options.systems or urls}
