"""A map of CPU bandwidth by output length: cases on a grid, with each system's own CPU kernel and with equal ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from apex.simulator.calibrated_profile import cpu_attention_gb_s, with_read_gb_s
from apex.simulator.hardware import LayerShape, load_host
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
from swiftllm.systems import find_system

PLACE = ("kernel", "host_read_gb_s", "output_len")
"""Fields of a row that name its cell."""


def make_map_points(settings: Mapping[str, Any], selection: Selection) -> list[Point]:
    """The points of the section ``map``: every cell with every system, GPU-only systems once for each output length.

    Raises:
        ValueError: a system is unknown, or cases are selected.
    """
    if selection.cases:
        raise ValueError("the map has cells in place of cases: leave out --cases")
    grid = settings["map"]
    cells = [cell_of(grid, output_len) for output_len in grid["num_requests"]]
    cells = [shortened(cell, settings) for cell in cells] if selection.quick else cells
    systems = chosen_systems(settings, selection)
    points = []
    for cell in cells:
        for system in systems:
            if not find_system(system).offloads:
                points.append(cell_point(grid, selection, cell, system))
    for kernel in (selection.kernel,) if selection.kernel else grid["kernels"]:
        for cell in cells:
            for read_gb_s in grid["host_read_gb_s"]:
                for system in systems:
                    if find_system(system).offloads:
                        points.append(cell_point(grid, selection, cell, system, kernel, read_gb_s))
    return points


def cell_of(grid: Mapping[str, Any], output_len: int) -> Case:
    return Case(
        case=f"out{output_len}",
        setting=grid["setting"],
        num_requests=grid["num_requests"][output_len],
        input_len=grid["input_len"],
        output_len=output_len,
    )


def cell_point(
    grid: Mapping[str, Any],
    selection: Selection,
    cell: Case,
    system: str,
    kernel: str | None = None,
    read_gb_s: float | None = None,
) -> Point:
    """A system in a cell; without ``kernel`` and ``read_gb_s``, a GPU-only system, which depends on neither."""
    setting = cell.paper_setting(None if kernel == OWN_KERNELS else kernel)
    lengths = cell.lengths(seed_of(grid, selection))
    values: dict[str, Any] = {"kernel": kernel, "host_read_gb_s": read_gb_s, "bound_tokens_per_s": None}
    names = [cell.case]
    if read_gb_s is not None:
        machine = with_host_memory(setting, SUBJECT, read_gb_s)
        values["bound_tokens_per_s"] = bound_tokens_per_s(case_task(cell, machine, SUBJECT, lengths, selection))
        setting = with_host_memory(setting, system, read_gb_s)
        names = [kernel, f"{read_gb_s:g}gbps", cell.case]
    return case_point(names, case_task(cell, setting, system, lengths, selection, values))


def with_host_memory(setting: PaperSetting, system: str, read_gb_s: float) -> PaperSetting:
    """The setting of a system on a host whose cores read ``read_gb_s`` from memory.

    CPU attention is slower than reading, by what the system's kernel computes.
    """
    host, shape = with_read_gb_s(load_host(setting.host), read_gb_s), LayerShape.from_config(setting.model_config)
    return replace(setting, cpu_bandwidth_gb_s=cpu_attention_gb_s(host, setting.kernel_of(system), shape))
