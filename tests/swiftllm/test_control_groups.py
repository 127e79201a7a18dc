"""Limits of control groups as the kernel enforces them: those of the own group and of every group around it.

The files are those of the kernel's Documentation/admin-guide/cgroup-v1 and cgroup-v2.rst, proc(5) and cgroups(7). Java,
Go and Node read the same limits.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from swiftllm import machine
from swiftllm.machine import available_host_bytes, usable_cores

MIB = 1 << 20
LARGE = "9223372036854771712"  # no limit, in version 1
OWN, MOUNTS = "proc/self/cgroup", "proc/self/mountinfo"
V2 = "sys/fs/cgroup"
MEMORY, CPU = "sys/fs/cgroup/memory", "sys/fs/cgroup/cpu,cpuacct"


def memory_2(limit: int | str, used: int, dropped: int = 0, high: int | str = "max") -> dict[str, str]:
    """MiB, as in all that follow."""
    limits = {"memory.max": bytes_of(limit), "memory.high": bytes_of(high)}
    return {**limits, "memory.current": bytes_of(used), "memory.stat": f"anon 1\ninactive_file {dropped * MIB}"}


def memory_1(limit: int | str, used: int, dropped: int = 0, above: int | str = LARGE) -> dict[str, str]:
    counts = f"inactive_file 1\nhierarchical_memory_limit {bytes_of(above)}\ntotal_inactive_file {dropped * MIB}"
    return {"memory.limit_in_bytes": bytes_of(limit), "memory.usage_in_bytes": bytes_of(used), "memory.stat": counts}


def bytes_of(size: int | str) -> str:
    return size if isinstance(size, str) else str(size * MIB)


def cpu_1(quota: int, period: int = 100_000) -> dict[str, str]:
    return {"cpu.cfs_quota_us": str(quota), "cpu.cfs_period_us": str(period)}


def mounted(*trees: tuple[str, str, str]) -> str:
    """Lines of mountinfo: the group at the top, the folder, the controllers ("" is version 2)."""
    lines = [
        f"{30 + n} 20 0:{30 + n} {top} /{folder} rw,nosuid shared:{n} - "
        + (f"cgroup cgroup rw,{tree}" if tree else "cgroup2 cgroup2 rw,nsdelegate")
        for n, (top, folder, tree) in enumerate(trees)
    ]
    return "\n".join(["20 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw", *lines, ""])


def version_1(own: str, top: str = "/") -> dict[str, str]:
    mounts = mounted((top, MEMORY, "memory"), (top, CPU, "cpu,cpuacct"), ("/", "sys/fs/cgroup/systemd", "name=systemd"))
    return {OWN: f"12:name=systemd:/\n5:memory:{own}\n4:cpu,cpuacct:{own}\n0::/\n", MOUNTS: mounts}


def version_2(own: str, top: str = "/") -> dict[str, str]:
    return {OWN: f"0::{own}\n", MOUNTS: mounted((top, V2, ""))}


def at(folder: str, files: dict[str, str]) -> dict[str, str]:
    return {f"{folder}/{name}": text for name, text in files.items()}


CASES = {
    "no control groups": ({}, 8, None),
    "version 2, no limits": (version_2("/a") | at(f"{V2}/a", memory_2("max", 9) | {"cpu.max": "max 100000"}), 8, None),
    "version 2, own group": (
        version_2("/a") | at(f"{V2}/a", memory_2(90, 50, 10) | {"cpu.max": "300000 100000"}),
        3,
        50,
    ),
    "version 2, a container": (version_2("/") | at(V2, memory_2(100, 40, 10) | {"cpu.max": "150000 50000"}), 3, 70),
    "version 2, nested: limits of the groups above": (
        version_2("/jobs/job7/step0")
        | at(f"{V2}/jobs", memory_2(100, 60) | {"cpu.max": "max 100000"})
        | at(f"{V2}/jobs/job7", memory_2("max", 5) | {"cpu.max": "250000 100000"})
        | at(f"{V2}/jobs/job7/step0", memory_2("max", 5) | {"cpu.max": "max 100000"}),
        2,
        40,
    ),
    "version 2, nested: the least counts": (
        version_2("/a/b")
        | at(f"{V2}/a", memory_2(100, 20) | {"cpu.max": "200000 100000"})
        | at(f"{V2}/a/b", memory_2(50, 15, 5) | {"cpu.max": "600000 100000"}),
        2,
        40,
    ),
    "version 2, a sibling's limits are none of ours": (
        version_2("/a") | at(f"{V2}/b", memory_2(50, 15) | {"cpu.max": "100000 100000"}) | at(f"{V2}/a", {}),
        8,
        None,
    ),
    "version 2, slowed beyond memory.high": (version_2("/a") | at(f"{V2}/a", memory_2(100, 30, high=70)), 8, 40),
    "version 2, a controller that is off": (version_2("/a/b") | at(f"{V2}/a", {"memory.max": str(80 * MIB)}), 8, 80),
    "version 2, a quota without its period": (version_2("/") | at(V2, {"cpu.max": "200000"}), 2, None),
    "version 2, less than one core": (version_2("/") | at(V2, {"cpu.max": "1000 100000"}), 1, None),
    "version 2, overdrawn": (version_2("/") | at(V2, memory_2(100, 140)), 8, 0),
    "version 2, the host's path, mounted as the container's": (
        version_2("/docker/abc/sub", "/docker/abc")
        | at(V2, memory_2(100, 40))
        | at(f"{V2}/sub", {"cpu.max": "200000 100000"}),
        2,
        60,
    ),
    "version 2, the host's path, and the own group at the top": (
        version_2("/docker/abc") | at(V2, memory_2(100, 40) | {"cpu.max": "200000 100000"}),
        2,
        60,
    ),
    "version 2, a namespace below the mount": (
        version_2("/", "/../..") | at(V2, memory_2(100, 40) | {"cpu.max": "200000 100000"}),
        2,
        60,
    ),
    "version 2, a group beside the namespace": (
        version_2("/../other") | at(V2, memory_2(100, 40)) | at("sys/fs/other", memory_2(30, 10)),
        8,
        60,
    ),
    "version 2, a group beside the namespace that is seen": (
        version_2("/../other", "/..") | at(V2, memory_2(100, 40)) | at(f"{V2}/other", memory_2(30, 10)),
        8,
        20,
    ),
    "version 2, mounted elsewhere": (
        {OWN: "0::/a\n", MOUNTS: mounted(("/", "mnt/my\\040groups", ""))} | at("mnt/my groups/a", memory_2(70, 10)),
        8,
        60,
    ),
    "version 2, a removed group": (version_2("/a/b (deleted)") | at(f"{V2}/a", memory_2(70, 10)), 8, 60),
    "version 2, without mountinfo": (
        {OWN: "0::/a\n"} | at(f"{V2}/a", memory_2(70, 10) | {"cpu.max": "100000 100000"}),
        1,
        60,
    ),
    "version 1, no limits": (version_1("/") | at(MEMORY, memory_1(LARGE, 90)) | at(CPU, cpu_1(-1)), 8, None),
    "version 1, a container": (version_1("/") | at(MEMORY, memory_1(90, 40, 20)) | at(CPU, cpu_1(100_000)), 1, 70),
    "version 1, the host's path, mounted as the container's": (
        version_1("/docker/abc", "/docker/abc") | at(MEMORY, memory_1(90, 40)) | at(CPU, cpu_1(400_000)),
        4,
        50,
    ),
    "version 1, the host's path, and the own group at the top": (
        version_1("/docker/abc") | at(MEMORY, memory_1(90, 40)) | at(CPU, cpu_1(400_000)),
        4,
        50,
    ),
    "version 1, nested": (
        version_1("/a/b")
        | at(MEMORY, memory_1(LARGE, 90))
        | at(f"{MEMORY}/a", memory_1(80, 70, 20))
        | at(f"{MEMORY}/a/b", memory_1(75, 9))
        | at(CPU, cpu_1(-1))
        | at(f"{CPU}/a", cpu_1(60_000, 20_000))
        | at(f"{CPU}/a/b", cpu_1(-1)),
        3,
        30,
    ),
    "version 1, a limit of a group that is not seen": (
        version_1("/") | at(MEMORY, memory_1(LARGE, 40, above=90)),
        8,
        50,
    ),
    "version 1, without mountinfo": (
        {OWN: "4:memory:/a\n3:cpu:/a\n"}
        | at(f"{MEMORY}/a", memory_1(90, 40))
        | at("sys/fs/cgroup/cpu/a", cpu_1(200_000)),
        2,
        50,
    ),
    "both: memory in version 1, cores in version 2": (
        {
            OWN: "4:memory:/a\n0::/c\n",
            MOUNTS: mounted(("/", MEMORY, "memory"), ("/", "sys/fs/cgroup/unified", "")),
        }
        | at(f"{MEMORY}/a", memory_1(90, 40))
        | at("sys/fs/cgroup/unified/c", {"cpu.max": "200000 100000"}),
        2,
        50,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_control_groups_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Of 8 cores and the memory of this machine."""
    files, cores, left_mib = CASES[name]
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(f"{text}\n")
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setattr(machine, "allowed_cores", lambda: frozenset(range(8)))
    assert usable_cores() == cores
    if left_mib is not None:
        assert available_host_bytes() == left_mib * MIB
    else:  # the machine's
        assert available_host_bytes() > 1 << 28


def test_a_part_of_the_machine_is_a_part_of_the_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request) -> None:
    (tmp_path / V2).mkdir(parents=True)
    (tmp_path / V2 / "cpu.max").write_text("600000 100000\n")
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setattr(machine, "allowed_cores", lambda: frozenset(range(8)))
    request.addfinalizer(lambda: machine.limit_use(of_host=1.0, of_card=1.0))
    machine.limit_use(of_host=1 / 3, of_card=1.0)
    assert usable_cores() == 2
