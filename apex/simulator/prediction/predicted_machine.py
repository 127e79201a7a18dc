"""A predicted machine from the names of GPUs, a host and a model. Imports torch to read models: import it late."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from apex.perf.model import ProfileTable
from apex.simulator.hardware.files import (
    Gpu,
    Host,
    known_hardware,
    known_model,
    known_models,
    load_gpu,
    load_host,
    load_link,
    load_model_config,
)
from apex.simulator.prediction.calibrated_profile import (
    BITS_PER_BYTE,
    ITEMSIZES,
    hardware_profile,
    how_known,
    remote_hosts,
)
from apex.simulator.virtual.cpu_hosts import RemoteHosts
from swiftllm.config import CpuKVDtype
from swiftllm.kv.budget import CPU_TIER_SHARE, SIMULATED_GPU_SHARE, MemoryBudget, choose_blocks
from swiftllm.kv.format import KVFormat, cpu_format
from swiftllm.model.config.model_config import ModelConfig
from swiftllm.model.config.quantisation import AWQ, QuantisationScheme
from swiftllm.model.weights.sizes import weight_bytes as bytes_of_weights

Weights = Literal["auto", "int4"]
INT4 = QuantisationScheme(AWQ, group_size=128)  # the most common one


@dataclass(frozen=True)
class PredictedMachine:
    """GPUs of a kind, a host, the model on them, and its predicted profile table.

    ``tensor_parallel``: the number of GPUs, among which every layer is divided.
    """

    gpu: Gpu
    host: Host
    model: ModelConfig
    model_name: str
    dtype: str
    table: ProfileTable
    tensor_parallel: int = 1
    remote_hosts: RemoteHosts | None = None
    cpu_kv_dtype: CpuKVDtype = "auto"

    @property
    def cpu_hosts(self) -> int:
        """Hosts that compute CPU attention, the GPUs' own among them."""
        return 1 + (self.remote_hosts.count if self.remote_hosts else 0)

    @property
    def description(self) -> str:
        gb_s = self.table.identity["cpu_attention_gb_s"]
        gpus = self.gpu.name
        if self.tensor_parallel > 1:
            gpus = f"{self.tensor_parallel}x {gpus} over {self.table.identity['link']}"
        hosts = self.host.name
        if self.remote_hosts is not None:
            hosts = f"{self.cpu_hosts} hosts of {hosts}"
            gb_s += f" GB/s on each over {self.remote_hosts.bytes_per_s * BITS_PER_BYTE / 1e9:g} Gb/s"
        else:
            gb_s += " GB/s"
        weights = "" if self.model.quantisation is None else f", {self.table.identity['weights']}"
        tier = "" if self.cpu_kv_dtype == "auto" else f" in {self.cpu_kv_dtype}"
        return f"{self.model_name} ({self.dtype}{weights}) on {gpus} and {hosts}, CPU attention{tier} at {gb_s}"

    @property
    def how_known(self) -> str:
        """What the predicted times of its GPU rest on."""
        return how_known(self.gpu, self.model)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, packed where they are quantised."""
        if self.model.quantisation is not None:
            return bytes_of_weights(self.model, getattr(torch, self.dtype))
        return self.model.num_parameters * ITEMSIZES[self.dtype]

    def budget(self, block_size: int) -> MemoryBudget:
        """What the machine's memory holds, with KV blocks of ``block_size`` tokens."""
        dtype = getattr(torch, self.dtype)
        return MemoryBudget(
            device_bytes=self.gpu["memory_gb"] * self.tensor_parallel * 1e9 * SIMULATED_GPU_SHARE,
            host_bytes=self.host["memory_gb"] * 1e9 * self.cpu_hosts,
            weight_bytes=self.weight_bytes,
            bytes_per_block=KVFormat.exact(dtype).block_bytes(self.model, block_size),
            cpu_bytes_per_block=cpu_format(self.cpu_kv_dtype, dtype).block_bytes(self.model, block_size),
        )

    def in_4_bits(self, block_size: int) -> MemoryBudget | None:
        """What the memory holds with 4-bit weights; None if they are quantised already, or would not fit either."""
        if self.model.quantisation is not None or self.model.experts is not None:
            return None
        budget = replace(self, model=replace(self.model, quantisation=INT4)).budget(block_size)
        return budget if budget.max_gpu_blocks else None

    def num_blocks(self, num_gpu: int | None, num_cpu: int | None, block_size: int) -> tuple[int, int]:
        """KV blocks of the GPU and the CPU tier: the given numbers, else what the memory allows.

        Raises:
            ValueError: the weights leave no room on the GPU, or a tier exceeds its memory.
        """
        budget = self.budget(block_size)
        most = budget.max_gpu_blocks, budget.max_cpu_blocks
        if most[0] == 0:
            raise ValueError(
                f"{self.model_name} takes {budget.weight_bytes / 1e9:.1f} GB in {self.dtype} and {self.gpu.name} has "
                f"{self.gpu['memory_gb'] * self.tensor_parallel:g} GB, of which {SIMULATED_GPU_SHARE:.0%} may be used: "
                "take a larger --gpu, more of them (--tensor-parallel), a smaller --model, --weights int4 or "
                "--weights-gpu-memory auto"
            )
        return choose_blocks((num_gpu, num_cpu), most, (most[0], int(most[1] * CPU_TIER_SHARE)))


def predict_machine(
    gpu_name: str,
    host_name: str,
    model_name: str,
    dtype: str,
    *,
    tensor_parallel: int = 1,
    link_name: str | None = None,
    cpu_hosts: int = 1,
    network_gbps: float = 100.0,
    host_memory_gib: float | None = None,
    host_read_gb_s: float | None = None,
    weights: Weights = "auto",
    cpu_kv_dtype: CpuKVDtype = "auto",
    **options: Any,
) -> PredictedMachine:
    """The machine of these names or paths.

    Args:
        host_memory_gib, host_read_gb_s: in place of the host's own figures, see :meth:`Host.with_given`.
        weights: auto: as the model's config.json says; int4: 4 bits in groups of 128.
        cpu_kv_dtype: the format of the CPU tier.
        options: of :func:`apex.simulator.prediction.calibrated_profile.hardware_profile`.

    Raises:
        ValueError: a name is unknown (the message lists the known ones), or an option is invalid.
    """
    gpu = _find("gpu", gpu_name, load_gpu, known_hardware("gpu"))
    host = _find("host", host_name, load_host, known_hardware("host")).with_given(host_memory_gib, host_read_gb_s)
    model = _find("model", model_name, load_model_config, known_models())
    if weights == "int4":
        model = replace(model, quantisation=INT4)
    links = known_hardware("link")
    if tensor_parallel > 1 and link_name is None:
        raise ValueError(f"--tensor-parallel {tensor_parallel} needs --link, which joins the GPUs: {', '.join(links)}")
    link = None if link_name is None else _find("link", link_name, load_link, links)
    options |= {"dtype": dtype, "cpu_kv_dtype": cpu_kv_dtype, "tensor_parallel": tensor_parallel, "link": link}
    table = hardware_profile(gpu, host, model, **options)
    remote = remote_hosts(host, model, dtype, cpu_hosts, network_gbps)
    name = known_model(model_name) or Path(model_name).name
    return PredictedMachine(gpu, host, model, name, dtype, table, tensor_parallel, remote, cpu_kv_dtype)


def _find(what: str, name: str, load: Callable[[str], Any], names: Sequence[str]) -> Any:
    """Load by name or path; the error for an unknown name suggests the nearest known one."""
    try:
        return load(name)
    except ValueError as error:
        near = difflib.get_close_matches(name.lower(), names, n=4, cutoff=0.3) if name not in names else []
        others = f" Near are {', '.join(near[1:])}, too." if near[1:] else ""
        raise ValueError(f"--{what}: {error}" + (f". Did you mean {near[0]}?{others}" if near else "")) from None
