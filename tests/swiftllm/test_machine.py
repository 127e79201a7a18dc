"""NVIDIA cards, as ``nvidia-smi`` on the PATH reports them: a script here."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from swiftllm import machine
from swiftllm.machine import Card, available_host_bytes, first_card, installed_cards

T4 = Card("Tesla T4", 15360 << 20, (7, 5))
A10G = Card("NVIDIA A10G", 23028 << 20, (8, 6))
TWO = "Tesla T4, 15360, 7.5\nNVIDIA A10G, 23028, 8.6\n"


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Puts an ``nvidia-smi`` with this answer and exit status on a PATH of its own."""

    def put(answer: str, status: int = 0) -> Path:
        (tmp_path / "answer").write_text(answer)
        program = tmp_path / "nvidia-smi"
        arguments = f'echo "$@" > {tmp_path / "arguments"}'
        lines = f'while IFS= read -r line; do echo "$line"; done < {tmp_path / "answer"}'
        program.write_text(f"#!/bin/sh\n{arguments}\n{lines}\nexit {status}\n")
        program.chmod(0o755)
        return program

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return put


def test_cards_are_read_in_the_order_of_their_index(nvidia_smi):
    program = nvidia_smi(TWO)
    assert installed_cards() == [T4, A10G]
    asked = (program.parent / "arguments").read_text().split()
    assert asked == ["--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits"]


@pytest.mark.parametrize(
    ("answer", "cards"),
    [
        ("NVIDIA RTX, Laptop GPU, 8192, 8.9\n", [Card("NVIDIA RTX, Laptop GPU", 8192 << 20, (8, 9))]),
        ("NVIDIA B200, 183359, 10.0\n", [Card("NVIDIA B200", 183359 << 20, (10, 0))]),
        ("NVIDIA GB10, [N/A], 12.1\n", []),  # shares the host's memory
        ("Tesla K80, 11441, [N/A]\n", []),
        ("\nnothing here\n", []),
        ("", []),
    ],
)
def test_lines_that_are_no_cards_are_left_out(nvidia_smi, answer, cards):
    nvidia_smi(answer)
    assert installed_cards() == cards and first_card() == (cards[0] if cards else None)


@pytest.mark.parametrize(
    ("visible", "card"),
    [
        (None, T4),
        ("0", T4),
        ("1", A10G),
        ("1,0", A10G),
        (" 1 , 0", A10G),
        ("2", None),
        ("", None),
        ("-1", None),
        ("NoDevFiles", None),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", T4),
        ("MIG-8932f937-d72c-4106-c12f-20bd9faed9f6", T4),
    ],
)
def test_the_first_card_is_the_one_cuda_sees_first(nvidia_smi, monkeypatch, visible, card):
    nvidia_smi(TWO)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert first_card() == card


def test_a_machine_without_a_driver_has_no_cards(nvidia_smi):
    assert installed_cards() == [] and first_card() is None


@pytest.mark.parametrize("answer", [TWO, "NVIDIA-SMI has failed because it couldn't communicate with the driver.\n"])
def test_an_nvidia_smi_that_fails_reports_nothing(nvidia_smi, answer):
    nvidia_smi(answer, status=9)
    assert installed_cards() == [] and first_card() is None


def test_an_nvidia_smi_that_hangs_reports_nothing(nvidia_smi, monkeypatch):
    nvidia_smi(TWO)

    def hangs(command, *, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hangs)
    assert installed_cards() == [] and first_card() is None


MIB = 1 << 20
LARGE = "9223372036854771712"  # no limit, in version 1


@pytest.fixture
def control_groups(tmp_path, monkeypatch):
    """Makes the control groups of this process: files by folder, and the lines that say which group is its own."""

    def make(own: str, groups: dict[str, dict[str, str]]) -> None:
        monkeypatch.setattr(machine, "CONTROL_GROUP", tmp_path / "groups")
        monkeypatch.setattr(machine, "OWN_GROUPS", tmp_path / "own")
        (tmp_path / "own").write_text(own)
        for folder, files in groups.items():
            (tmp_path / "groups" / folder).mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (tmp_path / "groups" / folder / name).write_text(text + "\n")

    return make


def version_2(limit: str, used: int, dropped: int = 0) -> dict[str, str]:
    statistics = f"anon 1\ninactive_file {dropped * MIB}"
    return {"memory.max": limit, "memory.current": str(used * MIB), "memory.stat": statistics}


def version_1(limit: str, used: int, dropped: int = 0) -> dict[str, str]:
    statistics = f"inactive_file 1\ntotal_inactive_file {dropped * MIB}"
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": str(used * MIB), "memory.stat": statistics}


@pytest.mark.parametrize(
    ("own", "groups", "left"),
    [
        ("0::/\n", {"": version_2(str(100 * MIB), 40, 10)}, 70),
        ("0::/a/b\n", {"a": version_2(str(100 * MIB), 60), "a/b": version_2("max", 5)}, 40),
        ("0::/a/b\n", {"a": version_2(str(100 * MIB), 20), "a/b": version_2(str(50 * MIB), 15, 5)}, 40),
        ("4:memory:/a\n3:cpu:/\n", {"memory": version_1(LARGE, 90), "memory/a": version_1(str(80 * MIB), 70, 20)}, 30),
        ("4:memory:/docker/of-the-host\n", {"memory": version_1(str(80 * MIB), 50)}, 30),
        ("0::/\n", {"": version_2(str(100 * MIB), 140)}, 0),
    ],
    ids=["container", "group above", "tightest", "version 1", "version 1 in a container", "overdrawn"],
)  # fmt: skip
def test_a_control_groups_limit_is_what_can_be_taken(control_groups, own, groups, left):
    control_groups(own, groups)
    assert available_host_bytes() == left * MIB


@pytest.mark.parametrize("groups", [{}, {"": version_2("max", 5)}, {"memory": version_1(LARGE, 90)}])
def test_without_a_limit_the_machines_memory_counts(control_groups, groups, monkeypatch):
    before = available_host_bytes()
    control_groups("4:memory:/\n0::/\n", groups)
    assert available_host_bytes() == pytest.approx(before, rel=0.2) and available_host_bytes() > 1 << 28
