"""The papers' machines: makes tasks of simulated points from the settings of ``configs/experiments/papers.yaml``."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from apex.simulator.calibrated_profile import ITEMSIZES, cpu_attention_gb_s, hardware_profile
from apex.simulator.hardware import Figure, Gpu, Host, LayerShape, load_gpu, load_host, load_model_config
from evaluation.experiments.simulated_point import SimulatedHardware, SimulatedTask
from evaluation.results.paths import EXPERIMENTS_DIR
from evaluation.traces.catalogue import TraceRow
from evaluation.traces.workloads import Lengths
from swiftllm.model.config import ModelConfig
from swiftllm.scheduling.scheduler import SchedulerLimits

PAPERS_FILE = EXPERIMENTS_DIR / "papers.yaml"
BLOCK_SIZE = 16
DEFAULT_KERNEL = "native"
"""Kernel of the profile table for systems that compute no CPU attention."""


@dataclass(frozen=True)
class PaperSetting:
    """Machine, model and engine limits of a paper. Each entry of ``figures`` records where its limit comes from.

    To vary an assumption, replace ``host`` or ``cpu_bandwidth_gb_s`` (:func:`dataclasses.replace`), or figures with
    :meth:`with_figures`. If ``cpu_bandwidth_gb_s`` is None, each system has the rate of its kernel on the host.
    """

    name: str
    title: str
    gpu: str
    host: str
    model: str
    dtype: str
    origin: str
    figures: Mapping[str, Figure]
    cpu_kernels: Mapping[str, str]
    cpu_bandwidth_gb_s: float | None = None

    def __getitem__(self, figure: str) -> float:
        return self.figures[figure].value

    def with_figures(self, reason: str, **values: float) -> PaperSetting:
        """The setting with other limits, e.g. ``cpu_kv_gb`` of another host; ``reason`` becomes their origin."""
        changed = {
            name: replace(self.figures[name], value=value, status="assumed", origin=reason)
            for name, value in values.items()
        }
        return replace(self, figures={**self.figures, **changed})

    @property
    def limits(self) -> SchedulerLimits:
        names = ("max_num_batched_tokens", "max_num_seqs", "max_model_len")
        return SchedulerLimits(*(int(self[name]) for name in names))

    @property
    def num_gpu_blocks(self) -> int:
        return int(self["num_gpu_blocks"])

    @property
    def min_gpu_blocks(self) -> int:
        """GPU blocks of the longest request."""
        return -(-self.limits.max_model_len // BLOCK_SIZE)

    @property
    def max_gpu_blocks(self) -> int:
        """Blocks that fit the GPU's memory beside the weights, with nothing left for activations."""
        model, itemsize = _model(self.model), ITEMSIZES[self.dtype]
        free_bytes = _gpu(self.gpu)["memory_gb"] * 1e9 - model.num_parameters * itemsize
        return int(free_bytes // (model.kv_bytes_per_token(itemsize) * BLOCK_SIZE))

    @property
    def num_cpu_blocks(self) -> int:
        """Blocks that fit the host memory reserved for KV cache."""
        token_bytes = _model(self.model).kv_bytes_per_token(ITEMSIZES[self.dtype])
        return int(self["cpu_kv_gb"] * 1e9 // (token_bytes * BLOCK_SIZE))

    def kernel_of(self, system: str) -> str | None:
        """The CPU attention kernel of a system; None for a GPU-only system."""
        return self.cpu_kernels.get(system)

    def cpu_attention_gb_s(self, system: str) -> float | None:
        """GB/s at which the system's CPU attention reads KV cache; None for a GPU-only system."""
        kernel = self.kernel_of(system)
        if kernel is None or self.cpu_bandwidth_gb_s is not None:
            return self.cpu_bandwidth_gb_s if kernel else None
        shape = LayerShape.from_config(_model(self.model))
        return cpu_attention_gb_s(_host(self.host), kernel, shape)

    def gpu_attention_gb_s(self) -> float:
        """GB/s at which the GPU's decode attention reads KV cache, without kernel launches."""
        gpu = _gpu(self.gpu)
        return gpu["memory_bandwidth_gb_s"] * gpu["decode_attention_fraction"]

    def hardware(self, system: str) -> SimulatedHardware:
        """The predicted machine on which a system runs."""
        return _hardware(
            self.gpu,
            self.host,
            self.model,
            self.dtype,
            self.kernel_of(system) or DEFAULT_KERNEL,
            self.cpu_bandwidth_gb_s,
            self.limits.max_num_batched_tokens,
        )

    def make_task(self, system: str, lengths: Lengths, values: Mapping[str, Any] | None = None) -> SimulatedTask:
        """The task of a simulated point of this setting; ``values`` are further fields of its row.

        The workload is clipped to the longest request that the setting allows (:func:`clip_lengths`).
        """
        clipped, num_clipped = clip_lengths(lengths, self.limits.max_model_len)
        row = {
            "setting": self.name,
            "setting_title": self.title,
            "gpu_option": self.gpu,
            "host": _host(self.host).name,
            "num_gpu_blocks_status": self.figures["num_gpu_blocks"].status,
            "max_gpu_blocks": self.max_gpu_blocks,
            "cpu_kv_gb": self["cpu_kv_gb"],
            "cpu_bandwidth_gb_s": self.cpu_attention_gb_s(system),
            "gpu_attention_gb_s": self.gpu_attention_gb_s(),
            "max_model_len": self.limits.max_model_len,
            "num_clipped": num_clipped,
            **(values or {}),
        }
        return SimulatedTask(
            system=system,
            hardware=self.hardware(system),
            num_gpu_blocks=self.num_gpu_blocks,
            num_cpu_blocks=self.num_cpu_blocks,
            lengths=clipped,
            limits=self.limits,
            block_size=BLOCK_SIZE,
            values=row,
        )


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
        cut = TraceRow(given, min(row.output_tokens, max_model_len - given), row.arrival_s)
        num_clipped += cut != row
        rows.append(cut)
    return replace(lengths, rows=tuple(rows)), num_clipped


def load_setting(name: str, path: Path = PAPERS_FILE) -> PaperSetting:
    """A setting by name.

    Raises:
        ValueError: there is no such setting; the message lists the existing ones.
    """
    settings, kernels = _read(path)
    if name not in settings:
        raise ValueError(f"no setting {name!r} in {path}: known are {', '.join(settings)}")
    raw = settings[name]
    figures = {figure: Figure(**fields) for figure, fields in raw["figures"].items()}
    return PaperSetting(name, **{**raw, "figures": figures}, cpu_kernels=kernels)


@functools.cache
def _read(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    return raw["settings"], {system: entry["kernel"] for system, entry in raw["cpu_kernels"].items()}


# Cached: every point of a sweep needs the same few files.


@functools.cache
def _gpu(name: str) -> Gpu:
    return load_gpu(name)


@functools.cache
def _host(name: str) -> Host:
    return load_host(name)


@functools.cache
def _model(name: str) -> ModelConfig:
    return load_model_config(name)


@functools.cache
def _hardware(
    gpu: str, host: str, model: str, dtype: str, kernel: str, cpu_bandwidth_gb_s: float | None, max_tokens: int
) -> SimulatedHardware:
    config = _model(model)
    table = hardware_profile(
        _gpu(gpu),
        _host(host),
        config,
        dtype=dtype,
        cpu_kernel=kernel,
        cpu_bandwidth_gb_s=cpu_bandwidth_gb_s,
        block_size=BLOCK_SIZE,
        max_tokens=max_tokens,
    )
    return SimulatedHardware(_gpu(gpu).name, model, dtype, table, config.num_layers)
