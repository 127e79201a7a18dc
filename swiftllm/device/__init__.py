"""The device of the linear layers: a host or a CUDA GPU, behind one interface."""

import torch

from swiftllm.device.cuda import CudaDevice
from swiftllm.device.device import Device
from swiftllm.device.host import HostDevice


def open_device(name: str, index: int | None = None) -> Device:
    """``name``: cpu, cuda, or auto: CUDA where torch sees a GPU. ``index``: see :class:`CudaDevice`.

    Raises:
        ValueError: there is no such device here.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda' and torch sees no GPU; use device='cpu', or check the driver and torch build")
    on_gpu = name == "cuda" or (name == "auto" and torch.cuda.is_available())
    return CudaDevice(index) if on_gpu else HostDevice()
