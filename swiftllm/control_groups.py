"""Limits of memory and cores of this process's control groups, its own and those around it, in both versions.

Version 2 has one tree of groups, version 1 a tree for each controller; a system may have both. ``/proc/self/cgroup``
names the own group in each tree, ``/proc/self/mountinfo`` the folder that shows a tree and the group at its top. A
container sees its own group there, or the host's whole tree. Of what is not there nothing is known: no limit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

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
