"""What computes: the device of the linear layers, and the CPU beside it."""

from __future__ import annotations

import sys

import torch

from swiftllm.config import EngineConfig
from swiftllm.device.device import Device
from swiftllm.ops.cpu import CpuOps, torch_threads
from swiftllm.ops.select import select_ops
from swiftllm.runtime.cores import CoreDivision, core_divisions
from swiftllm.runtime.dtype_and_kernel import resolve_dtype, resolve_kernel

# The launching thread hands over a layer's work and sleeps, over and over. It may wake up while the CPU worker, or the
# event loop of a server, has the interpreter's lock. With Python's default of 5 ms it, and the device, would wait that
# long for it: a layer takes less.
SWITCH_INTERVAL_S = 0.001


class Processors:
    """
    Attributes:
        hardware: where the linear layers run.
        dtype: of weights, activations and KV cache.
        cpu_kernel: pacpu's kernel for attention over the CPU tier.
        ops, host_ops: the device's operations; those of boundaries that the CPU computes.
        cores: threads of a lane on a CPU, and of attention over the CPU tier.
    """

    def __init__(self, config: EngineConfig, hardware: Device) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self.hardware, device = hardware, hardware.torch_device
        self.dtype = resolve_dtype(config, device)
        self.cpu_kernel = resolve_kernel(config, self.dtype)
        self.ops = select_ops(device, self.dtype, self.cpu_kernel)
        self.host_ops = CpuOps()
        self.use_cores(core_divisions(config, lane_on_cpu=device.type == "cpu")[0])

    def use_cores(self, division: CoreDivision) -> None:
        """Compute with these numbers of threads from now on."""
        self.cores = division
        self.host_ops.num_threads = division.cpu_threads
        if isinstance(self.ops, CpuOps):
            torch.set_num_threads(torch_threads(self.dtype, division.lane_threads))
            self.ops.num_threads = division.lane_threads
        else:  # torch copies in host memory: more threads would spin after each copy on the worker's cores
            torch.set_num_threads(division.lane_threads)
            self.ops.num_threads = division.cpu_threads
