"""What this machine is and what it can give: processor, cores, host memory."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Mapping
from pathlib import Path

GIB = 1 << 30
CPUINFO = Path("/proc/cpuinfo")
CONTROL_GROUP = Path("/sys/fs/cgroup")


class InsufficientMemory(RuntimeError):
    """The model or the KV cache asked for does not fit; the message says what is there and how much is missing."""


def cpu_model() -> str:
    """The processor as the kernel names it; its numbers or the architecture where it has no name."""
    facts = cpu_info()
    name = facts.get("model name", "")
    if name and name != "unknown":
        return name
    numbers = [f"{key} {facts[key]}" for key in ("vendor_id", "cpu family", "model", "stepping") if key in facts]
    return ", ".join(numbers) or platform.processor() or platform.machine()


def cpu_flags() -> frozenset[str]:
    """Instruction-set extensions of the processor, by the kernel's names; empty where the system does not list them."""
    facts = cpu_info()
    return frozenset((facts.get("flags") or facts.get("Features") or "").split())


@functools.cache
def cpu_info() -> Mapping[str, str]:
    """The fields of the first core in ``/proc/cpuinfo``; empty on systems without that file."""
    try:
        text = CPUINFO.read_text()
    except OSError:
        return {}
    fields = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, colon, value in fields if colon}


def usable_cores() -> int:
    """Cores this process may compute on: by its affinity, or by the quota of its container where that is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota_us, period_us = (CONTROL_GROUP / "cpu.max").read_text().split()
        return max(1, min(cores, int(quota_us) // int(period_us)))
    except (OSError, ValueError):  # no control group, or "max": no quota
        return cores


def host_memory_bytes() -> int:
    """Memory of the machine, whatever of it this process may use."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_host_bytes() -> int:
    """Host memory that can be taken without swapping: the machine's, or the container's where that is less."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit = int((CONTROL_GROUP / "memory.max").read_text())
        used = int((CONTROL_GROUP / "memory.current").read_text())
        statistics = dict(line.split() for line in (CONTROL_GROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no control group, or "max": no limit
        return available
    return min(available, limit - used + int(statistics.get("inactive_file", 0)))


def last_level_cache_bytes() -> int:
    """Level-3 caches of all cores together; 0 where the system does not say."""
    sizes = {}
    for index in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index3"):
        try:
            size = (index / "size").read_text().strip()
            sizes[(index / "shared_cpu_list").read_text()] = int(size.rstrip("K")) * 1024
        except (OSError, ValueError):
            continue
    return sum(sizes.values())
