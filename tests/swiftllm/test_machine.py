"""NVIDIA cards, as ``nvidia-smi`` on the PATH reports them: a script here."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from swiftllm.machine import Card, first_card, installed_cards

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
