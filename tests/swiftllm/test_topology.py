"""Cores of NUMA nodes and GPUs, from made-up trees of files."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from swiftllm import machine
from swiftllm.kv.tensors import host_tensor
from swiftllm.machine import cores_of_ranks, count_physical, describe_cores, node_of_device, numa_nodes, parse_cores


def tree(folder: Path, nodes: Mapping[int, str], cards: Sequence[int] = (), siblings: Sequence[str] = ()) -> Path:
    """``/sys`` of a machine: cores of each node, the node of each GPU, cores that are one core's hardware threads."""
    files = {f"devices/system/node/node{node}/cpulist": cores for node, cores in nodes.items()}
    files |= {f"bus/pci/devices/{bus_id(card)}/numa_node": str(node) for card, node in enumerate(cards)}
    for text in siblings:
        for core in parse_cores(text):
            files[f"devices/system/cpu/cpu{core}/topology/thread_siblings_list"] = text
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True)
        path.write_text(text + "\n")
    return folder


def bus_id(card: int) -> str:
    return f"0000:{0x5A + card:02x}:00.0"


def divided(system: Path, allowed: str, ranks: int) -> list[str]:
    nodes = [node_of_device(bus_id(rank).upper(), system) for rank in range(ranks)]
    return [describe_cores(cores) for cores in cores_of_ranks(parse_cores(allowed), numa_nodes(system), nodes)]


@pytest.mark.parametrize(
    "nodes, cards, allowed, ranks, expected",
    [
        # Two nodes with two GPUs each, numbered across the nodes or along them.
        ({0: "0-7", 1: "8-15"}, (0, 0, 1, 1), "0-15", 4, ["0-3", "4-7", "8-11", "12-15"]),
        ({0: "0-7", 1: "8-15"}, (1, 0, 1, 0), "0-15", 4, ["8-11", "0-3", "12-15", "4-7"]),
        ({0: "0-7", 1: "8-15"}, (1, 1, 0, 0), "0-15", 2, ["0-7", "8-15"]),  # both on node 1: node 0 is not left idle
        ({0: "0-3,8-11", 1: "4-7,12-15"}, (1, 0), "0-15", 2, ["4-7,12-15", "0-3,8-11"]),
        # One node.
        ({0: "0-7"}, (0, 0), "0-7", 2, ["0-3", "4-7"]),
        ({0: "0-7"}, (0, 0, 0), "0-7", 3, ["0-1", "2-4", "5-7"]),
        # GPUs of which the kernel knows no node; no GPUs; no nodes.
        ({0: "0-3", 1: "4-7"}, (-1, -1), "0-7", 2, ["0-3", "4-7"]),
        ({0: "0-3", 1: "4-7"}, (), "0-7", 4, ["0-1", "2-3", "4-5", "6-7"]),
        ({}, (), "0-3", 2, ["0-1", "2-3"]),
        # A set of allowed cores: a core less on a node, most cores on one node, no core of a GPU's node.
        ({0: "0-7", 1: "8-15"}, (0, 0, 1, 1), "0-6,8-15", 4, ["0-2", "3-6", "8-11", "12-15"]),
        ({0: "0-7", 1: "8-15"}, (1, 0), "0-7,14-15", 2, ["5-7,14-15", "0-4"]),
        ({0: "0-7", 1: "8-15"}, (0, 1), "4-7", 2, ["4-5", "6-7"]),
        ({0: "0-7", 1: "8-15"}, (0, 1), "3", 2, []),
    ],
)
def test_ranks_get_the_cores_of_their_gpus_node(tmp_path, nodes, cards, allowed, ranks, expected) -> None:
    assert divided(tree(tmp_path, nodes, cards), allowed, ranks) == expected


def test_hardware_threads_of_a_core_stay_together(tmp_path) -> None:
    system = tree(tmp_path, {0: "0-7"}, (0, 0), siblings=("0,4", "1,5", "2,6", "3,7"))
    assert numa_nodes(system) == {0: [0, 4, 1, 5, 2, 6, 3, 7]}
    assert divided(system, "0-7", 2) == ["0-1,4-5", "2-3,6-7"]


def test_hardware_threads_of_a_core_count_once(tmp_path) -> None:
    system = tree(tmp_path, {0: "0-7"}, siblings=("0,4", "1,5", "2,6", "3,7"))
    assert [count_physical(cores, system) for cores in (range(8), (0, 4), (0, 1, 5), ())] == [4, 1, 2, 0]
    assert count_physical(range(8), tmp_path / "nothing") == 8


def test_lists_of_cores() -> None:
    assert parse_cores("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11] and parse_cores("\n") == []
    assert describe_cores([11, 0, 1, 2, 3, 8, 10]) == "0-3,8,10-11" and describe_cores(()) == ""


def test_a_bound_process_keeps_all_its_threads_on_its_cores_until_it_is_unbound() -> None:
    """In a process of its own, where another thread begins one while they are bound. What the engine may use stays as
    it was."""
    code = (
        "import os, threading\n"
        "from swiftllm.machine import allowed_cores, bind_to, unbind, usable_cores\n"
        "stop, before, usable = threading.Event(), allowed_cores(), usable_cores()\n"
        "listed, begun, listing = threading.Event(), threading.Event(), os.listdir\n"
        "def begin_one(): listed.wait(); threading.Thread(target=stop.wait, daemon=True).start(); begun.set()\n"
        "def list_and_wait(where): found = listing(where); listed.set(); begun.wait(); return found\n"
        "threading.Thread(target=begin_one, daemon=True).start(); os.listdir = list_and_wait\n"
        "def seen(): return {frozenset(os.sched_getaffinity(int(t))) for t in listing('/proc/self/task')}\n"
        "assert bind_to({min(before)}) and begun.is_set() and seen() == {frozenset({min(before)})}\n"
        "assert not bind_to({max(before)}) and (allowed_cores(), usable_cores()) == (before, usable)\n"
        "unbind(); assert seen() == {before}\n"
        "stop.set(); print('kept')"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(machine.__file__).parents[1])}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert run.stdout == "kept\n", run.stderr


def policy_of(tensor: torch.Tensor) -> str:
    """The memory policy of the mapping that begins with a tensor, such as ``interleave:0-1``."""
    lines = (line.split() for line in Path("/proc/self/numa_maps").read_text().splitlines())
    return next(policy for begin, policy, *_ in lines if int(begin, 16) == tensor.data_ptr())


@pytest.mark.skipif(
    platform.machine() not in machine.MBIND_CALLS or not Path("/proc/self/numa_maps").exists(),
    reason="this system does not tell the policy of its memory",
)
def test_memory_is_spread_over_the_nodes_of_a_thread_s_cores(tmp_path: Path) -> None:
    """This machine may have one node: of those that it is told, the kernel keeps the ones that there are."""
    own = describe_cores(os.sched_getaffinity(0))
    two = tree(tmp_path / "two", {0: own, 1: own, 2: "9000-9001"})
    size = 64 << 20
    spread, left = host_tensor((size,), torch.uint8), host_tensor((size,), torch.uint8)
    machine.spread_over_nodes(spread.data_ptr(), size, two)
    if policy_of(spread) == "default":
        pytest.skip("this system forbids mbind")
    assert policy_of(spread) in ("interleave:0", "interleave:0-1") and not spread.any()
    machine.spread_over_nodes(left.data_ptr(), size, tree(tmp_path / "one", {0: own, 1: "9000"}))
    assert policy_of(left) == "default"
