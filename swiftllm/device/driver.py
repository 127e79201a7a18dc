"""The NVIDIA driver of this machine, and why torch sees no GPU beside it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch

OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}
"""CUDA's major version to the oldest branch of Linux drivers that runs it, by NVIDIA's compatibility table."""


@dataclass(frozen=True)
class NvidiaDriver:
    """``control`` exists where the driver is loaded; ``version_file`` is what its kernel module says of itself."""

    control: Path = Path("/dev/nvidiactl")
    version_file: Path = Path("/proc/driver/nvidia/version")

    def version(self) -> str | None:
        """Such as 535.183.01; None where there is no driver, or it does not say."""
        try:
            first_line = self.version_file.read_text().partition("\n")[0]
        except OSError:
            return None
        found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", first_line)
        return found and found.group()

    def why_no_gpu(self) -> str | None:
        """Why torch sees no GPU, with the versions and the remedy. None where torch sees one, where no driver is
        loaded, and where CUDA_VISIBLE_DEVICES hides all GPUs on purpose."""
        if torch.cuda.is_available() or not self.control.exists():
            return None
        if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
            return None
        version, cuda = self.version(), torch.version.cuda
        driver = f"NVIDIA driver {version}" if version else "an NVIDIA driver of unknown version"
        if cuda is None:
            problem = f"torch {torch.__version__} is a build without CUDA"
            remedy = "install torch's CUDA build (`make setup` takes it from the package index)"
        else:
            problem = f"torch {torch.__version__} is built for CUDA {cuda}"
            oldest = OLDEST_DRIVERS.get(int(cuda.partition(".")[0]))
            if oldest is None:
                remedy = "install the driver that this CUDA needs, or a torch built for an older CUDA"
            elif version is None or int(version.partition(".")[0]) < oldest:
                problem += f", which needs driver {oldest} or later"
                remedy = f"install driver {oldest} or later, or a torch built for an older CUDA"
            else:
                remedy = "the driver is new enough, and no GPU answers: see `nvidia-smi`"
        return f"torch sees no GPU although this machine has {driver}: {problem}; {remedy}"


INSTALLED = NvidiaDriver()
