"""Where cores, memory and GPUs lie, as the kernel tells it below ``/sys``, and which cores each rank gets.

Plain Python, and pure functions of a folder: cores must be taken before torch is loaded, whose threads inherit them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

SYSTEM = Path("/sys")


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
