"""This machine: its processor, cores, memory and GPUs, the limits on them, and a share of them for one engine."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import math
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

# -- limits of control groups ------------------------------------------------------------------------------------------
# Limits of memory and cores of this process's control groups, its own and those around it, in both versions.
#
# Version 2 has one tree of groups, version 1 a tree for each controller; a system may have both. ``/proc/self/cgroup``
# names the own group in each tree, ``/proc/self/mountinfo`` the folder that shows a tree and the group at its top. A
# container sees its own group there, or the host's whole tree. Of what is not there nothing is known: no limit.

VERSION_2 = ""
"""Its tree's name; those of version 1 have the controller's."""
USUAL_FOLDERS = {VERSION_2: "sys/fs/cgroup", "memory": "sys/fs/cgroup/memory", "cpu": "sys/fs/cgroup/cpu"}
"""Of trees that mountinfo does not tell."""
MEMORY_FILES = {
    VERSION_2: (("memory.max", "memory.high"), "memory.current", "inactive_file"),
    "memory": (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
}
"""By tree: the files of a group's limits and use, and the line of memory.stat that counts files which can be dropped.
At memory.max the kernel ends processes; beyond memory.high it slows them until they hardly move."""
PERIOD_US = 100_000
"""Of a quota that tells none."""


def memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Of each group that limits memory: the limit, and the bytes in use that stay. ``root``: of the file system."""
    for tree, (limit_files, used_file, droppable) in MEMORY_FILES.items():
        for group in _groups(root, tree):
            lines = [line.partition(" ") for line in _read(group / "memory.stat").splitlines()]
            counts = {name: count for name, _, count in lines}
            limits = [_read(group / name) for name in limit_files]
            limits.append(counts.get("hierarchical_memory_limit", ""))  # version 1: of groups above the tree's top, too
            if known := [int(limit) for limit in limits if limit.isdecimal()]:
                yield min(known), int(_read(group / used_file) or 0) - int(counts.get(droppable, 0))


def core_limit(root: Path) -> float:
    """How many cores' time all groups allow; infinite without a limit."""
    quotas = [_read(group / "cpu.max").split() for group in _groups(root, VERSION_2)]
    of_version_1 = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    quotas += [[_read(group / name) for name in of_version_1] for group in _groups(root, "cpu")]
    cores = math.inf
    for quota, *period in filter(None, quotas):
        if quota.isdecimal():  # others: "max", -1, or no such file
            period_us = next((int(us) for us in period if us.isdecimal() and int(us)), PERIOD_US)
            cores = min(cores, int(quota) / period_us)
    return cores


def _groups(root: Path, tree: str) -> Iterator[Path]:
    """The folders of the own group and of all around it, up to the top of what is seen of the tree."""
    own = _own_groups(root).get(tree, "/")
    for top, folder in _mounts(root, tree) or [("/", root / USUAL_FOLDERS[tree])]:
        try:
            below = PurePosixPath(own).relative_to(top)
        except ValueError:  # a group outside of what is seen, or told by a name that does not hold here
            below = PurePosixPath()
        for part in (below, *below.parents):
            if ".." not in part.parts:
                yield folder / part


def _own_groups(root: Path) -> dict[str, str]:
    """The own group in each tree."""
    own = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, trees, group = line.split(":", 2)
        own |= dict.fromkeys(trees.split(","), group)
    return own


def _mounts(root: Path, tree: str) -> list[tuple[str, Path]]:
    """The group at the top of each folder that shows the tree, and the folder."""
    mounts = []
    for line in _read(root / "proc/self/mountinfo").splitlines():
        mounted, _, what = line.partition(" - ")
        kind, *options = what.split() or [""]
        if kind == "cgroup2" if tree == VERSION_2 else kind == "cgroup" and tree in options[-1].split(","):
            top, folder = (re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), x) for x in mounted.split()[3:5])
            mounts.append((top, root / folder.lstrip("/")))
    return mounts


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, ValueError):
        return ""


# -- properties --------------------------------------------------------------------------------------------------------
# Properties of this machine: processor, usable cores, host memory, NVIDIA cards.

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
    os.sched_setaffinity(0, cores)  # first: threads that this one begins from now on inherit it
    bound: set[str] = set()
    while found := set(os.listdir("/proc/self/task")) - bound:  # again: one that was not bound yet may have begun some
        for thread in found:
            with contextlib.suppress(ProcessLookupError):  # a thread that has ended
                os.sched_setaffinity(int(thread), cores)
        bound |= found


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


# -- NUMA nodes --------------------------------------------------------------------------------------------------------
# Where cores, memory and GPUs lie, as the kernel tells it below ``/sys``, and which cores each rank gets.
#
# Plain Python, and pure functions of a folder: cores must be taken before torch is loaded, whose threads inherit them.

SYSTEM = Path("/sys")
MBIND_CALLS = {"x86_64": 237, "aarch64": 235}
"""Linux's number of ``mbind``, which the C library does not have."""
MPOL_INTERLEAVE = 3
BITS_OF_WORD = 64


def numa_nodes(system: Path = SYSTEM) -> dict[int, list[int]]:
    """The cores of each NUMA node, hardware threads of one core side by side; empty where the system does not tell."""
    nodes = {}
    for folder in (system / "devices/system/node").glob("node[0-9]*"):
        try:
            cores = parse_cores((folder / "cpulist").read_text())
            nodes[int(folder.name[4:])] = sorted(cores, key=lambda core: (_first_sibling(core, system), core))
        except (OSError, ValueError):
            continue
    return dict(sorted(nodes.items()))


def _first_sibling(core: int, system: Path) -> int:
    try:
        path = system / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list"
        return min(parse_cores(path.read_text()))
    except (OSError, ValueError):
        return core


def count_physical(cores: Collection[int], system: Path = SYSTEM) -> int:
    """How many cores these are if hardware threads of one core count once."""
    return len({_first_sibling(core, system) for core in cores})


def node_of_device(bus_id: str, system: Path = SYSTEM) -> int | None:
    """The NUMA node of a PCI device such as ``0000:65:00.0``; None: the kernel knows of none."""
    try:
        node = int((system / "bus/pci/devices" / bus_id.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def spread_over_nodes(address: int, num_bytes: int, system: Path = SYSTEM) -> None:
    """Memory that nobody has written gets its pages from the NUMA nodes of this thread's cores in turn, whichever
    thread writes them first. Where the system forbids it, as containers may, or there is one node, nothing changes.

    ``address``: of the first page of a mapping.
    """
    of_system, call = numa_nodes(system), MBIND_CALLS.get(platform.machine())
    if call is None or len(of_system) < 2:
        return
    cores = os.sched_getaffinity(0)
    nodes = [node for node, its_cores in of_system.items() if cores.intersection(its_cores)]
    if len(nodes) < 2:
        return
    words = (ctypes.c_ulong * (max(nodes) // BITS_OF_WORD + 1))()
    for node in nodes:
        words[node // BITS_OF_WORD] |= 1 << node % BITS_OF_WORD
    num_bits = len(words) * BITS_OF_WORD + 1  # Linux takes one off
    memory = ctypes.c_void_p(address), ctypes.c_ulong(num_bytes)
    ctypes.CDLL(None).syscall(ctypes.c_long(call), *memory, MPOL_INTERLEAVE, words, ctypes.c_ulong(num_bits), 0)


def in_node_order(allowed: Collection[int], nodes: Mapping[int, Sequence[int]]) -> list[int]:
    """The ``allowed`` cores, those of a node side by side; cores of no node come last."""
    cores = [core for node in nodes.values() for core in node if core in allowed]
    return cores + sorted(set(allowed).difference(cores))


def equal_parts(cores: Sequence[int], parts: int) -> list[list[int]]:
    """``parts`` adjacent parts, which differ by one core at most."""
    bounds = [number * len(cores) // parts for number in range(parts + 1)]
    return [list(cores[start:stop]) for start, stop in itertools.pairwise(bounds)]


def cores_of_ranks(
    allowed: Collection[int], nodes: Mapping[int, Sequence[int]], node_of_rank: Sequence[int | None]
) -> list[list[int]]:
    """The cores of each rank, of those that are ``allowed``; empty: there are fewer cores than ranks.

    ``node_of_rank``: the NUMA node of each rank's GPU, None where there is none. A rank has cores of that node if all
    ranks then have equally many, up to one, and no core is left over: each CPU attention waits for the slowest rank,
    and needs the memory of all nodes. Otherwise the cores in the order of nodes are cut into equal parts, which
    ranks get in the order of their GPUs' nodes.
    """
    size = len(node_of_rank)
    if len(allowed) < size:
        return []
    ranks = sorted(range(size), key=lambda rank: (node_of_rank[rank] is None, node_of_rank[rank] or 0, rank))
    ordered = in_node_order(allowed, nodes)
    parts: list[list[int]] = []
    for node, group in itertools.groupby(ranks, key=lambda rank: node_of_rank[rank]):
        local = [] if node is None else [core for core in nodes.get(node, ()) if core in allowed]
        parts += equal_parts(local, len(list(group)))
    sizes = [len(part) for part in parts]
    if sum(sizes) < len(ordered) or max(sizes) - min(sizes) > 1:
        parts = equal_parts(ordered, size)
    of_rank = dict(zip(ranks, parts, strict=True))
    return [of_rank[rank] for rank in range(size)]


def parse_cores(text: str) -> list[int]:
    """The cores of a list such as ``0-3,8-11``."""
    cores = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores


def describe_cores(cores: Collection[int]) -> str:
    """The inverse of :func:`parse_cores`."""
    runs = itertools.groupby(enumerate(sorted(cores)), key=lambda pair: pair[1] - pair[0])
    bounds = [(run[0][1], run[-1][1]) for run in (list(group) for _, group in runs)]
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in bounds)


# -- a share for one of several engines --------------------------------------------------------------------------------
# A share of this machine for one of several engines on it: cores, memory, and GPUs or a part of one.
#
# Plain Python: a share must be taken before torch is loaded, whose threads inherit the cores.


@dataclass(frozen=True)
class Share:
    """Part ``number`` of ``parts`` equal parts, counted from 1."""

    number: int
    parts: int

    @classmethod
    def parse(cls, text: str) -> Share:
        """From text such as ``1/4``.

        Raises:
            ValueError: it is no such text.
        """
        match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise ValueError(f"share={text!r} must be like 1/4 for the first of four engines, up to 4/4")
        return cls(int(match[1]), int(match[2]))

    def cores_of(self, cores: Sequence[int]) -> list[int]:
        """The cores of this part. Parts are adjacent, differ by one core at most, and have at least one core each."""
        if len(cores) < self.parts:
            raise ValueError(f"share={self.number}/{self.parts}: there are {len(cores)} cores for {self.parts} engines")
        return equal_parts(cores, self.parts)[self.number - 1]

    def cards_of(self, cards: Sequence[str]) -> tuple[list[str], float]:
        """The GPUs of this part, and its fraction of each: whole GPUs, or a part of a single one."""
        count = len(cards)
        if count % self.parts == 0:
            each = count // self.parts
            return list(cards[(self.number - 1) * each : self.number * each]), 1.0
        if self.parts % count == 0:
            on_each = self.parts // count
            return [cards[(self.number - 1) // on_each]], 1 / on_each
        raise ValueError(f"share={self.number}/{self.parts}: {count} GPUs cannot be divided among {self.parts} engines")


def take_share(share: Share) -> None:
    """Confine this process to its share: cores, whose NUMA node its memory then comes from, memory and GPUs."""
    cores = share.cores_of(in_node_order(os.sched_getaffinity(0), numa_nodes(SYSTEM)))
    cards, of_card = visible_cards(), 1.0
    if cards:
        cards, of_card = share.cards_of(cards)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(cards)
    os.sched_setaffinity(0, cores)
    limit_use(of_host=1 / share.parts, of_card=of_card)


def visible_cards() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(index) for index in range(len(installed_cards()))]
    return [] if visible.strip() in ("", "-1") else [name.strip() for name in visible.split(",")]
