"""Simulated points of the papers' machines: the tasks of :class:`~apex.simulator.paper_settings.PaperSetting`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from apex.perf.model import Curve, ProfileTable
from apex.simulator.hardware.files import load_gpu, load_host, load_link, load_model_config
from apex.simulator.paper_settings import BLOCK_SIZE, PaperSetting
from apex.simulator.prediction.calibrated_profile import hardware_profile
from apex.workloads.requests import Lengths
from evaluation.experiments.simulated_point import SimulatedHardware, SimulatedTask

DEFAULT_KERNEL = "native"
"""Kernel of the profile table for systems that compute no CPU attention."""


def simulated_task(
    setting: PaperSetting, system: str, lengths: Lengths, values: Mapping[str, Any] | None = None
) -> SimulatedTask:
    """The task of a simulated point of a setting; ``values`` are further fields of its row.

    The workload is clipped to the longest request that the setting allows (:func:`clip_lengths`).
    """
    clipped, num_clipped = clip_lengths(lengths, setting.limits.max_model_len)
    row = {
        "setting": setting.name,
        "setting_title": setting.title,
        "gpu_option": setting.gpus,
        "host": load_host(setting.host).name,
        "num_gpu_blocks_status": setting.figures["num_gpu_blocks"].status,
        "max_gpu_blocks": setting.max_gpu_blocks,
        "cpu_kv_gb": setting["cpu_kv_gb"],
        "cpu_bandwidth_gb_s": setting.cpu_attention_gb_s(system),
        "gpu_attention_gb_s": setting.gpu_attention_gb_s(),
        "max_model_len": setting.limits.max_model_len,
        "num_clipped": num_clipped,
        **({} if setting.cpu_kv_dtype == "auto" else {"cpu_kv_dtype": setting.cpu_kv_dtype}),
        **_reading_values(setting, system),
        **({} if (launch_us := setting.attention_launch_us(system)) is None else {"attention_launch_us": launch_us}),
        **_parallel_values(setting),
        **(values or {}),
    }
    return SimulatedTask(
        system=system,
        hardware=simulated_hardware(setting, system),
        num_gpu_blocks=setting.num_gpu_blocks,
        num_cpu_blocks=setting.num_cpu_blocks,
        lengths=clipped,
        limits=setting.limits,
        block_size=BLOCK_SIZE,
        values=row,
    )


def _reading_values(setting: PaperSetting, system: str) -> dict[str, Any]:
    """Fields of a row of a setting that is one of several readings of a paper's machine; other rows do not have them.

    ``paper_setting`` is the name under which claims.yaml has the machine.
    """
    if setting.reading is None:
        return {}
    kernel = setting.kernel_of(system)
    own = {"paper_setting": setting.like or setting.name, "reading": setting.reading}
    return {**own, "cpu_kernel": kernel} if kernel else own


def _parallel_values(setting: PaperSetting) -> dict[str, Any]:
    """Fields of a row of several GPUs or several CPU hosts; other rows do not have them."""
    gpus = {"tensor_parallel": setting.tensor_parallel, "link": setting.link}
    hosts = {"cpu_hosts": setting.cpu_hosts, "network_gbps": setting.network_gbps}
    return {**(gpus if setting.tensor_parallel > 1 else {}), **(hosts if setting.cpu_hosts > 1 else {})}


def simulated_hardware(setting: PaperSetting, system: str) -> SimulatedHardware:
    """The predicted machine on which a system runs."""
    kernel = setting.kernel_of(system)
    table = _table(
        setting.gpu,
        setting.host,
        setting.model,
        setting.link,
        dtype=setting.dtype,
        cpu_kernel=kernel or DEFAULT_KERNEL,
        cpu_kv_dtype=setting.cpu_kv_dtype,
        cpu_bandwidth_gb_s=setting.stated_cpu_gb_s(kernel) if kernel else setting.cpu_bandwidth_gb_s,
        max_tokens=setting.limits.max_num_batched_tokens,
        tensor_parallel=setting.tensor_parallel,
    )
    if launch_us := setting.attention_launch_us(system):
        table = with_hand_over(table, launch_us)
    card, gpus = load_gpu(setting.gpu).name, setting.tensor_parallel
    cards, layers = card if gpus == 1 else f"{gpus}x {card}", setting.model_config.num_layers
    return SimulatedHardware(cards, setting.model, setting.dtype, table, layers, remote_hosts=setting.remote_hosts)


def with_hand_over(table: ProfileTable, microseconds: float) -> ProfileTable:
    """The table of a machine whose GPU batch spends this on submitting each attention task."""
    return replace(table, hand_over=Curve((1, 2), (microseconds * 1e-6,) * 2))


@functools.cache  # every point of a grid needs the same few
def _table(gpu: str, host: str, model: str, link: str | None, **options: Any) -> ProfileTable:
    joined = None if link is None else load_link(link)
    machine = load_gpu(gpu), load_host(host), load_model_config(model)
    return hardware_profile(*machine, link=joined, block_size=BLOCK_SIZE, **options)


def clip_lengths(lengths: Lengths, max_model_len: int) -> tuple[Lengths, int]:
    """Cut outputs, and prompts where they alone are too long, so that no request exceeds ``max_model_len`` tokens.

    No engine would serve such a request: the papers' engines block their queue, ours refuses it before queueing. So a
    harness that measures throughput must not send it.

    Returns:
        The clipped workload, and the number of clipped requests.
    """
    rows, num_clipped = [], 0
    for row in lengths.rows:
        given = min(row.input_tokens, max_model_len - 1)
        cut = replace(row, input_tokens=given, output_tokens=min(row.output_tokens, max_model_len - given))
        num_clipped += cut != row
        rows.append(cut)
    return replace(lengths, rows=tuple(rows)), num_clipped
