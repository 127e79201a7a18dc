"""The papers' machines as their evaluations set them up, and which of them is nearest to a GPU.

They are the settings of ``configs/experiments/papers.yaml``. Imports torch to read models: import it late.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from apex.simulator.hardware_files import Figure, LayerShape, known_hardware, load_gpu, load_host, load_model_config
from apex.simulator.links import RemoteHosts
from apex.simulator.predicted_profile import ITEMSIZES, cpu_attention_gb_s, remote_hosts
from apex.source_tree import CONFIGS
from swiftllm.config import CpuKVDtype, EngineConfig
from swiftllm.kv.tensors import cpu_format
from swiftllm.machine import InsufficientMemory
from swiftllm.model.config import ModelConfig
from swiftllm.runtime.memory import MemoryBudget, blocks_in
from swiftllm.runtime.memory_estimate import estimate_memory
from swiftllm.scheduling.validation import SchedulerLimits

# -- the settings ------------------------------------------------------------------------------------------------------

PAPERS_FILE = CONFIGS / "experiments" / "papers.yaml"
BLOCK_SIZE = 16
OF_GPU = "_of_gpu_attention"
"""Ending of a figure: a kernel's rate of CPU attention over the GPU's."""
OTHER_NAMES = {"a10g": "a10"}  # AWS's A10: NEO's, too
T4_BELOW_BYTES = 20 * 10**9  # a card with less holds the weights of Llama-2-7B at best, not those of Llama-3.1-8B


@dataclass(frozen=True)
class PaperSetting:
    """Machine, model and engine limits of a paper. Each entry of ``figures`` records where its limit comes from.

    A setting ``like`` another is a reading of the same paper's machine: a paper's claims about it are about both.
    ``reading`` names the assumptions by which two such settings differ; None where there is one setting.

    ``launch_us`` is what the code of a paper's system spends on launches for each attention task, in microseconds; it
    counts only if the setting ``charges_launches``.

    To vary an assumption, replace ``host`` or ``cpu_bandwidth_gb_s`` (:func:`dataclasses.replace`), or figures with
    :meth:`with_figures`. If ``cpu_bandwidth_gb_s`` is None, each system has the rate of its kernel: the share of the
    GPU's that a figure ``<kernel>_of_gpu_attention`` states, without one that on the host.

    ``gpu``, ``link``, ``host`` and ``model`` are names in ``configs``; ``hub_name`` is the name of the model's
    checkpoint. ``tensor_parallel`` GPUs share each layer over ``link``, and hold ``num_gpu_blocks`` together.
    ``cpu_hosts`` equal hosts, the GPUs' own among them, have ``cpu_kv_gb`` each and a network of ``network_gbps``.
    """

    name: str
    title: str
    gpu: str
    host: str
    model: str
    hub_name: str
    dtype: str
    origin: str
    figures: Mapping[str, Figure]
    cpu_kernels: Mapping[str, str]
    launch_us: Mapping[str, float]
    cpu_kv_dtype: CpuKVDtype = "auto"
    cpu_bandwidth_gb_s: float | None = None
    tensor_parallel: int = 1
    link: str | None = None
    cpu_hosts: int = 1
    network_gbps: float = 100.0
    charges_launches: bool = False
    like: str | None = None
    reading: str | None = None

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
    def gpus(self) -> str:
        """The GPUs in a word: "a10", or "2xh100" for two."""
        return self.gpu if self.tensor_parallel == 1 else f"{self.tensor_parallel}x{self.gpu}"

    @property
    def model_config(self) -> ModelConfig:
        return _model(self.model)

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
        """Blocks that fit the GPUs' memory beside the weights, with nothing left for activations."""
        model, itemsize = self.model_config, ITEMSIZES[self.dtype]
        free_bytes = load_gpu(self.gpu)["memory_gb"] * self.tensor_parallel * 1e9 - model.num_parameters * itemsize
        return blocks_in(free_bytes, model.kv_bytes_per_token(itemsize) * BLOCK_SIZE)

    @property
    def num_cpu_blocks(self) -> int:
        """Blocks that fit the memory of all hosts that is reserved for KV cache."""
        in_host = cpu_format(self.cpu_kv_dtype, getattr(torch, self.dtype))
        return blocks_in(self["cpu_kv_gb"] * 1e9, in_host.block_bytes(self.model_config, BLOCK_SIZE)) * self.cpu_hosts

    @property
    def remote_hosts(self) -> RemoteHosts | None:
        """The CPU hosts beside the GPUs' own; None without one."""
        return remote_hosts(load_host(self.host), self.model_config, self.dtype, self.cpu_hosts, self.network_gbps)

    def kernel_of(self, system: str) -> str | None:
        """The CPU attention kernel of a system; None for a GPU-only system."""
        return self.cpu_kernels.get(system)

    def cpu_attention_gb_s(self, system: str) -> float | None:
        """GB/s at which the system's CPU attention reads KV cache; None for a GPU-only system.

        Raises:
            ValueError: there is no figure for the system's kernel; the message says which kernels have one.
        """
        kernel = self.kernel_of(system)
        if kernel is None:
            return None
        if (stated := self.stated_cpu_gb_s(kernel)) is not None:
            return stated
        shape = LayerShape.from_config(self.model_config)
        return cpu_attention_gb_s(load_host(self.host), kernel, shape, self.cpu_kv_dtype)

    def attention_launch_us(self, system: str) -> float | None:
        """Microseconds that launches add to each attention task of a system; None if its paper's code has no figure."""
        if system not in self.launch_us:
            return None
        return self.launch_us[system] if self.charges_launches else 0.0

    def stated_cpu_gb_s(self, kernel: str) -> float | None:
        """GB/s of a kernel where the setting itself states it; None where it follows from the host."""
        shares = {name.removesuffix(OF_GPU): figure for name, figure in self.figures.items() if name.endswith(OF_GPU)}
        if self.cpu_bandwidth_gb_s is not None or not shares:
            return self.cpu_bandwidth_gb_s
        if kernel not in shares:
            raise ValueError(f"{self.name} states the speed of the kernels {', '.join(shares)}, not of {kernel}")
        return shares[kernel].value * self.gpu_attention_gb_s()

    def inputs(self) -> list[str]:
        """What the setting takes the machine to be, a line for each: the value, its status and its origin."""
        gpu_gb_s, systems = self.gpu_attention_gb_s(), {}
        for system in ("neo", "apex"):
            systems[self.kernel_of(system)] = system
        lines = []
        for kernel, system in systems.items():
            rate = self.cpu_attention_gb_s(system)
            assert rate is not None, "they decode on the CPU"
            stated = self.figures.get(f"{kernel}{OF_GPU}")
            why = (
                f"{stated.status}: {stated.origin}" if stated else f"its share of what {self.host} reads, measured here"
            )
            share = f"{rate:.1f} GB/s, {rate / gpu_gb_s:.1%} of the GPU's {gpu_gb_s:.0f}"
            lines.append(f"CPU attention of {system} ({kernel} kernel): {share} ({why})")
        for name, what in (("num_gpu_blocks", "KV blocks on the GPU"), ("cpu_kv_gb", "GB of KV cache on the host")):
            figure = self.figures[name]
            lines.append(f"{figure.value:,g} {what} ({figure.status}: {figure.origin})")
        return lines

    def gpu_attention_gb_s(self) -> float:
        """GB/s at which the GPU's decode attention reads KV cache, without kernel launches."""
        gpu = load_gpu(self.gpu)
        return gpu["memory_bandwidth_gb_s"] * gpu["decode_attention_fraction"]


def setting_names(path: Path = PAPERS_FILE) -> tuple[str, ...]:
    """The names of all settings, in the order of the file."""
    return tuple(_read(path)["settings"])


def load_setting(name: str, path: Path = PAPERS_FILE) -> PaperSetting:
    """A setting by name.

    Raises:
        ValueError: there is no such setting; the message lists the existing ones.
    """
    raw = _read(path)
    if name not in raw["settings"]:
        raise ValueError(f"no setting {name!r} in {path}: known are {', '.join(raw['settings'])}")
    fields = raw["settings"][name]
    base = raw["settings"][fields["like"]] if "like" in fields else {"figures": {}}
    fields = {**base, **fields, "figures": {**base["figures"], **fields["figures"]}}
    figures = {figure: Figure(**entry) for figure, entry in fields["figures"].items()}
    kernels = {system: entry["kernel"] for system, entry in raw["cpu_kernels"].items()}
    launch_us = {system: entry["attention_us"] for system, entry in raw["launches"].items()}
    hub_name = raw["models"][fields["model"]]["hub"]
    given = {**fields, "figures": figures, "cpu_kernels": kernels, "launch_us": launch_us, "hub_name": hub_name}
    return PaperSetting(name, **given)


def gpu_kind(product_name: str) -> str | None:
    """The name in ``configs/hardware`` of a GPU by the product name that its driver reports; None: it has no file.

    An A10G is of kind "a10": NEO's "A10" is one.
    """
    # Whole words: the name of an A100 begins like that of an A10.
    words = re.findall(r"[a-z0-9]+", product_name.lower())
    kinds = known_hardware("gpu")
    return next((kind for kind in (OTHER_NAMES.get(word, word) for word in words) if kind in kinds), None)


def nearest_setting(kind: str | None, device_bytes: int, paper: Literal["apex", "neo"] = "apex") -> str:
    """The name of the paper's setting for a GPU of a kind and memory: its own, else that of the card nearest in memory.

    ``kind``: see :func:`gpu_kind`. ``device_bytes``: the GPU's memory.
    """
    if kind not in ("t4", "a10"):
        kind = "t4" if device_bytes < T4_BELOW_BYTES else "a10"
    return f"{paper}-{kind}"


@functools.cache
def _read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@functools.cache  # every point of a sweep needs the same few models
def _model(name: str) -> ModelConfig:
    return load_model_config(name)


# -- which of them this machine can run --------------------------------------------------------------------------------
# Which settings of the papers this machine can run: the lines of ``apex doctor`` about them.
#
# Imports torch to read models: import it late.

Status = Literal["ok", "note"]
Line = tuple[str, str, Status]
"""The name of a setting, what is found, and whether it runs as the paper sets it up."""


def setting_lines(product_name: str, device_bytes: int, host_bytes: int) -> Iterator[Line]:
    """A line for each setting.

    Args:
        product_name: of the GPU, as its driver reports it.
        device_bytes: the GPU's memory as torch reports it.
        host_bytes: available host memory.
    """
    kind = gpu_kind(product_name)
    nearest = {nearest_setting(kind, device_bytes, paper) for paper in ("apex", "neo")}
    for name in setting_names():
        setting = load_setting(name)
        if setting.tensor_parallel > 1:
            gpus = f"{setting.tensor_parallel}x {load_gpu(setting.gpu).name}"
            yield name, f"can only be simulated: it has {gpus}, and an engine uses one GPU", "note"
        elif setting.gpu == kind or name in nearest:
            yield name, *_found(setting, product_name, setting_fit(setting, device_bytes, host_bytes))
        else:
            card = load_gpu(setting.gpu)
            here = f"this is {product_name} with {device_bytes / 1e9:.1f} GB"
            yield name, f"needs another GPU: {card.name} with {card['memory_gb']:g} GB, and {here}", "note"


def _found(setting: PaperSetting, product_name: str, fit: MemoryBudget) -> tuple[str, Status]:
    """What a GPU that is the setting's own or near to it can run of it."""
    is_own = setting.gpu == gpu_kind(product_name)
    try:
        fit.check(setting.num_gpu_blocks if is_own else setting.min_gpu_blocks, 0)
    except InsufficientMemory as error:
        return f"{setting.hub_name} does not fit: {error}", "note"
    if is_own:
        pool = f"{setting.num_gpu_blocks:,} GPU blocks, of {fit.max_gpu_blocks:,} that fit"
    else:
        card = load_gpu(setting.gpu).name
        pool = f"{product_name} instead of {card}: same workload, up to {fit.max_gpu_blocks:,} GPU blocks"
    is_whole = fit.max_cpu_blocks >= setting.num_cpu_blocks
    held_gb = min(setting.num_cpu_blocks, fit.max_cpu_blocks) * fit.host_block_bytes / 1e9
    host = f"holds {'' if is_whole else 'only '}{held_gb:.1f} of {setting['cpu_kv_gb']:g} GB of KV cache"
    return f"{setting.hub_name}, {pool}; host memory {host}", "ok" if is_own and is_whole else "note"


def setting_fit(setting: PaperSetting, device_bytes: int, host_bytes: int) -> MemoryBudget:
    """What a machine's memory holds of a setting's model, beside the widest iteration of the setting's limits."""
    config = EngineConfig(setting.model, block_size=BLOCK_SIZE, **vars(setting.limits))
    dtype = getattr(torch, setting.dtype)
    return estimate_memory(config, setting.model_config, dtype, device_bytes=device_bytes, host_bytes=host_bytes)
