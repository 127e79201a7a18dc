"""Properties of this machine: processor, usable cores, host memory, NVIDIA cards."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import platform
import shutil
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from swiftllm.control_groups import core_limit, memory_limits

GIB = 1 << 30
CPUINFO = Path("/proc/cpuinfo")
ROOT = Path("/")
"""Of the file system in which control groups are looked up."""
NVIDIA_SMI_TIMEOUT_S = 30.0


@dataclass
class _Limits:
    """The parts of host and card that this process may use, 0 to 1."""

    of_host: float = 1.0
    of_card: float = 1.0
    unbound: frozenset[int] | None = None
    """The cores of all ranks together, where this process is bound to a part of them."""


_limits = _Limits()


def limit_use(*, of_host: float, of_card: float) -> None:
    """From now on report only these parts of the host's memory and quota of cores, and of a card's memory."""
    _limits.of_host, _limits.of_card = of_host, of_card


def gib_rounded_up(size: float) -> str:
    """Bytes in GiB with two decimals, for limits that hold at least so much."""
    return f"{math.ceil(size / GIB * 100) / 100:.2f}"


def card_share() -> float:
    """The part of a card's memory that this process may use."""
    return _limits.of_card


class InsufficientMemory(RuntimeError):
    """The model or the requested KV cache does not fit. The message has the available and the missing memory."""


def cpu_model() -> str:
    """The processor's name from the kernel; without one, its identification numbers or the architecture."""
    facts = cpu_info()
    name = facts.get("model name", "")
    if name and name != "unknown":
        return name
    numbers = [f"{key} {facts[key]}" for key in ("vendor_id", "cpu family", "model", "stepping") if key in facts]
    return ", ".join(numbers) or platform.processor() or platform.machine()


def cpu_flags() -> frozenset[str]:
    """The processor's instruction-set extensions, by the kernel's names; empty if the system does not list them."""
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


def allowed_cores() -> frozenset[int]:
    """The cores of this process's CPU affinity, or of all ranks where it is one that is bound."""
    if _limits.unbound is not None:
        return _limits.unbound
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def bind_to(cores: Collection[int]) -> bool:
    """Run all threads of this process, and those to come, on ``cores`` only, until :func:`unbind`.

    Memory then comes from the NUMA node of the core that writes it first. A process that is bound already stays as it
    is. Returns whether it was not.
    """
    if _limits.unbound is not None:
        return False
    _limits.unbound = allowed_cores()
    _set_affinity(cores)
    return True


def unbind() -> None:
    """Undo :func:`bind_to`."""
    cores, _limits.unbound = _limits.unbound, None
    if cores is not None:
        _set_affinity(cores)


def _set_affinity(cores: Collection[int]) -> None:
    os.sched_setaffinity(0, cores)  # first: threads that begin from now on inherit it
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # a thread that has ended
            os.sched_setaffinity(int(thread), cores)


def usable_cores() -> int:
    """Cores that this process may use: the lesser of its CPU affinity and the quotas of its control groups; of a rank
    that is bound to cores: those that all ranks may use."""
    return max(1, int(min(len(allowed_cores()), _limits.of_host * core_limit(ROOT))))


def host_memory_bytes() -> int:
    """Total memory of the machine, including what this process may not use."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_host_bytes() -> int:
    """Host memory available without swapping: the least of the machine's, of what control groups leave, and of what is
    left of this process's part of it."""
    available, total = _available_and_total_bytes()
    if _limits.of_host == 1.0:
        return available
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return max(0, min(available, int(_limits.of_host * total) - resident_pages * os.sysconf("SC_PAGE_SIZE")))


def _available_and_total_bytes() -> tuple[int, int]:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available, total = int(fields["MemAvailable"].split()[0]) * 1024, host_memory_bytes()
    for limit, used in memory_limits(ROOT):
        available, total = min(available, limit - used), min(total, limit)
    return max(0, available), total


def last_level_cache_bytes() -> int:
    """Total size of all level-3 caches; 0 if the system does not report it."""
    sizes = {}
    for index in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index3"):
        try:
            size = (index / "size").read_text().strip()
            sizes[(index / "shared_cpu_list").read_text()] = int(size.rstrip("K")) * 1024
        except (OSError, ValueError):
            continue
    return sum(sizes.values())


@dataclass(frozen=True)
class Card:
    """An NVIDIA GPU: its product name, its memory in bytes, its compute capability."""

    name: str
    total_bytes: int
    capability: tuple[int, int]


def installed_cards() -> list[Card]:
    """The NVIDIA GPUs of this machine by index, without starting CUDA in this process; empty if none answers."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = "--query-gpu=name,memory.total,compute_cap"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=NVIDIA_SMI_TIMEOUT_S)
    except subprocess.TimeoutExpired:  # nvidia-smi hangs when a GPU is lost
        return []
    lines = answer.stdout.splitlines() if answer.returncode == 0 else []
    return [card for line in lines if (card := _parsed_card(line)) is not None]


def _parsed_card(line: str) -> Card | None:
    """A card from ``name, MiB, major.minor``; None if the driver does not give one of these."""
    try:
        name, mebibytes, capability = (part.strip() for part in line.rsplit(",", 2))
        major, minor = capability.split(".")
        return Card(name, int(mebibytes) << 20, (int(major), int(minor)))
    except ValueError:
        return None


def first_card() -> Card | None:
    """The card on which CUDA computes by default: the first of CUDA_VISIBLE_DEVICES, else the first there is."""
    cards = installed_cards()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not cards:
        return cards[0] if cards else None
    first = visible.split(",")[0].strip()
    if first.isdigit():
        return cards[int(first)] if int(first) < len(cards) else None
    # An empty value or -1 hides all cards. A card may also be named by its UUID, which the list does not give.
    return cards[0] if first.startswith(("GPU-", "MIG-")) else None
