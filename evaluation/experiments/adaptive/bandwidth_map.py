"""A map of CPU bandwidth by output length: cases on a grid, with each system's own CPU kernel and with equal ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from apex.simulator.calibrated_profile import cpu_attention_gb_s, host_read_gb_s
from apex.simulator.hardware import Host, LayerShape, load_host
from apex.simulator.paper_settings import PaperSetting
from evaluation.experiments.adaptive.bound import bound_tokens_per_s
from evaluation.experiments.adaptive.cases import (
    OWN_KERNELS,
    SUBJECT,
    Case,
    Selection,
    case_point,
    case_task,
    chosen_systems,
    seed_of,
    shortened,
)
from evaluation.experiments.runner import Point
from evaluation.experiments.simulated_point import SimulatedTask
from evaluation.traces.workloads import Lengths
from swiftllm.systems import find_system

CPU = ("kernel", "host_read_gb_s")
"""Fields of a row that name its CPU; None for a system that uses none. With the output length they name its cell."""


def with_read_gb_s(host: Host, gb_s: float) -> Host:
    """The host with other memory, from which its cores read ``gb_s``."""
    peak = host.figures["peak_bandwidth_gb_s"]
    other = replace(peak, value=peak.value * gb_s / host_read_gb_s(host), status="assumed", origin="varied")
    return replace(host, figures={**host.figures, "peak_bandwidth_gb_s": other})


def make_map_points(settings: Mapping[str, Any], selection: Selection) -> list[Point]:
    """The points of the section ``map``: every cell with every system, GPU-only systems once for each output length.

    Raises:
        ValueError: a system is unknown, or cases are selected.
    """
    if selection.cases:
        raise ValueError("the map has cells in place of cases: leave out --cases")
    grid = settings["map"]
    systems = chosen_systems(settings, selection)
    gpu_only = [system for system in systems if not find_system(system).needs_predictions]
    hybrid = [system for system in systems if system not in gpu_only]
    rows = [row_of(grid, output_len) for output_len in grid["num_requests"]]
    rows = [shortened(row, settings) for row in rows] if selection.quick else rows
    lengths = {row.case: row.lengths(seed_of(grid, selection)) for row in rows}
    points = []
    for row in rows:
        values = {"kernel": None, "host_read_gb_s": None, "bound_tokens_per_s": None}
        setting = row.paper_setting(None)
        for system in gpu_only:
            points.append(
                case_point((row.case,), case_task(row, setting, system, lengths[row.case], selection, values))
            )
    for kernel in (selection.kernel,) if selection.kernel else grid["kernels"]:
        for row in rows:
            setting = row.paper_setting(None if kernel == OWN_KERNELS else kernel)
            for read_gb_s in grid["host_read_gb_s"]:
                points += cell_points(row, setting, hybrid, lengths[row.case], selection, kernel, read_gb_s)
    return points


def row_of(grid: Mapping[str, Any], output_len: int) -> Case:
    """A row of the map: the cells of an output length, as a case whose CPU is open."""
    return Case(
        case=f"out{output_len}",
        setting=grid["setting"],
        num_requests=grid["num_requests"][output_len],
        input_len=grid["input_len"],
        output_len=output_len,
    )


def cell_points(
    row: Case,
    setting: PaperSetting,
    systems: Sequence[str],
    lengths: Lengths,
    selection: Selection,
    kernel: str,
    read_gb_s: float,
) -> list[Point]:
    """The systems in a cell of a row. ``setting`` has the kernels, which the cell's rows call ``kernel``."""

    def task(system: str, **values: Any) -> SimulatedTask:
        named = {"kernel": kernel, "host_read_gb_s": read_gb_s, **values}
        return case_task(row, with_host_memory(setting, system, read_gb_s), system, lengths, selection, named)

    bound = bound_tokens_per_s(task(SUBJECT))
    names = (kernel, f"{read_gb_s:g}gbps", row.case)
    return [case_point(names, task(system, bound_tokens_per_s=bound)) for system in systems]


def with_host_memory(setting: PaperSetting, system: str, read_gb_s: float) -> PaperSetting:
    """The setting of a system on a host whose cores read ``read_gb_s`` from memory.

    CPU attention is slower than reading, by what the system's kernel computes.
    """
    host, shape = with_read_gb_s(load_host(setting.host), read_gb_s), LayerShape.from_config(setting.model_config)
    return replace(setting, cpu_bandwidth_gb_s=cpu_attention_gb_s(host, setting.kernel_of(system), shape))
