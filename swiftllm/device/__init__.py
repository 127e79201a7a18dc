"""The device of the linear layers: a host or a CUDA GPU, behind one interface."""

import torch

from swiftllm.device.cuda import CudaDevice
from swiftllm.device.device import Device
from swiftllm.device.driver import INSTALLED, NvidiaDriver
from swiftllm.device.host import HostDevice


def open_device(
    name: str, index: int | None = None, *, in_group: bool = False, driver: NvidiaDriver = INSTALLED
) -> Device:
    """``name``: cpu, cuda, or auto: CUDA where torch sees a GPU, the host where there is none.

    ``index`` and ``in_group``: see :class:`CudaDevice`.

    Raises:
        ValueError: there is no such device here. Also for auto where the machine has a driver and torch sees no GPU:
            the CPU would be taken for it in silence.
    """
    if name == "cpu":
        return HostDevice()
    if torch.cuda.is_available():
        return CudaDevice(index, in_group=in_group)
    if (reason := driver.why_no_gpu()) is not None:
        raise ValueError(f"{reason}; --device cpu computes without it")
    if name == "cuda":
        raise ValueError("device='cuda' and torch sees no GPU; use device='cpu', or check the driver and torch build")
    return HostDevice()
