"""What machine this is, as far as a profile table or a doctor's report needs to know."""

from __future__ import annotations

import platform
from pathlib import Path

from swiftllm.cores import usable_cores


def cpu_name() -> str:
    """The processor's name and how many cores this process may use."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    return f"{name} x{usable_cores()}"
