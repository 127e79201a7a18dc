"""Equal parts of a machine: cores of one NUMA node, memory, GPUs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from apex.cli import main
from swiftllm import machine
from swiftllm.machine import Share, take_share


@pytest.mark.parametrize("cores, parts", [(8, 4), (7, 3), (4, 4), (64, 5), (2, 1)])
def test_parts_take_all_cores_once_and_evenly(cores: int, parts: int) -> None:
    taken = [Share(number, parts).cores_of(range(100, 100 + cores)) for number in range(1, parts + 1)]
    assert sorted(core for part in taken for core in part) == list(range(100, 100 + cores))
    assert max(map(len, taken)) - min(map(len, taken)) <= 1
    assert all(part == list(range(part[0], part[0] + len(part))) for part in taken)


def test_cards_are_divided_or_shared() -> None:
    four = ["0", "1", "2", "3"]
    assert Share(3, 4).cards_of(four) == (["2"], 1.0)
    assert Share(2, 2).cards_of(four) == (["2", "3"], 1.0)
    assert Share(4, 4).cards_of(["GPU-a", "GPU-b"]) == (["GPU-b"], 0.5)
    assert Share(2, 4).cards_of(["0"]) == (["0"], 0.25)
    with pytest.raises(ValueError, match="3 GPUs cannot be divided among 2"):
        Share(1, 2).cards_of(["0", "1", "2"])


def test_texts_that_are_no_share() -> None:
    assert Share.parse(" 2/3 ") == Share(2, 3)
    for wrong in ("0/4", "5/4", "1", "1/0", "a/b", "-1/4", "1/4/2"):
        with pytest.raises(ValueError, match="like 1/4"):
            Share.parse(wrong)
    with pytest.raises(ValueError, match="1 cores for 2"):
        Share(1, 2).cores_of([0])


def test_a_share_follows_numa_nodes_and_limits_memory(monkeypatch: pytest.MonkeyPatch, tmp_path, request) -> None:
    for node, cores in ((0, "0-1,4-5"), (1, "2-3,6-7"), (2, "40-41")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores)
    pinned = []
    monkeypatch.setattr(machine, "SYSTEM", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: pinned.append(cores))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    request.addfinalizer(lambda: machine.limit_use(of_host=1.0, of_card=1.0))
    before = machine.available_host_bytes()
    take_share(Share(2, 2))
    assert pinned == [[2, 3, 6, 7]] and os.environ["CUDA_VISIBLE_DEVICES"] == "7"
    take_share(Share(4, 4))
    assert pinned[1] == [6, 7] and machine.card_share() == 0.25  # one card is visible by now
    assert machine.available_host_bytes() < before
    assert machine.available_host_bytes() <= machine.host_memory_bytes() / 4


def test_a_process_keeps_to_its_share() -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core cannot be shared")
    code = (
        "import os, sys; from swiftllm.machine import Share, take_share; from swiftllm.machine import usable_cores\n"
        "take_share(Share.parse('2/2')); assert 'torch' not in sys.modules\n"
        "print(sorted(os.sched_getaffinity(0)), usable_cores())"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    half = len(cores) - len(cores) // 2
    assert len(eval(said.stdout.partition("]")[0] + "]")) == half and said.stdout.split()[-1] <= str(half)


def test_the_command_says_what_is_wrong(capsys) -> None:
    assert main(["serve", "/nowhere", "--share", "3/2"]) == 2
    assert "share='3/2' must be like 1/4" in capsys.readouterr().err
