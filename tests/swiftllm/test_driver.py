"""A machine with an NVIDIA driver on which torch sees no GPU: the CPU is not taken for it in silence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from apex.cli import doctor
from swiftllm.device import HostDevice, NvidiaDriver, open_device

PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\nGCC version\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder@U22)\n"


@pytest.fixture(autouse=True)
def no_gpu_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def driver(folder: Path, text: str | None) -> NvidiaDriver:
    (folder / "nvidiactl").touch()
    if text is not None:
        (folder / "version").write_text(text)
    return NvidiaDriver(folder / "nvidiactl", folder / "version")


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_driver_older_than_the_build_needs_is_an_error_that_says_so(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="no GPU") as told:
        open_device(name, driver=driver(tmp_path, PROPRIETARY))
    for word in ("535.183.01", f"torch {torch.__version__}", "CUDA 13.0", "install driver 580", "--device cpu"):
        assert word in str(told.value)


@pytest.mark.parametrize(
    ("text", "cuda", "remedy"),
    [
        (OPEN, "13.0", "new enough, and no GPU answers: see `nvidia-smi`"),
        (PROPRIETARY, "12.8", "new enough, and no GPU answers: see `nvidia-smi`"),
        (PROPRIETARY, None, "is a build without CUDA; install torch's CUDA build"),
        (None, "13.0", "unknown version"),
        (OPEN, "14.1", "install the driver that this CUDA needs"),
    ],
)
def test_the_remedy_fits_the_driver_and_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, cuda: str | None, remedy: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(ValueError) as told:
        open_device("auto", driver=driver(tmp_path, text))
    assert remedy in str(told.value)


def test_the_cpu_is_taken_when_asked_for_and_where_there_is_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = driver(tmp_path, PROPRIETARY)
    assert isinstance(open_device("cpu", driver=old), HostDevice)
    assert isinstance(open_device("auto", driver=NvidiaDriver(tmp_path / "none", tmp_path / "none")), HostDevice)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert isinstance(open_device("auto", driver=old), HostDevice), "who hides the GPUs means the CPU"


def test_the_doctor_says_the_same(tmp_path: Path) -> None:
    (finding,) = doctor.gpus(driver(tmp_path, PROPRIETARY))
    assert finding.status == "missing" and "535.183.01" in finding.found and "--device cpu" in finding.found
    (finding,) = doctor.gpus(NvidiaDriver(tmp_path / "none", tmp_path / "none"))
    assert finding.status == "note" and "no NVIDIA driver" in finding.found


def test_the_oldest_driver_that_runs_a_build_is_new_enough(tmp_path: Path) -> None:
    """NVIDIA's compatibility table: CUDA 13 runs on the branch 580 and later."""
    for version, is_enough in (("580.65.06", True), ("575.64.03", False)):
        text = f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Sun Jul  6 09:02:34 UTC 2025\n"
        why = driver(tmp_path, text).why_no_gpu()
        assert version in why and ("the driver is new enough" in why) == is_enough
        assert ("install driver 580 or later" in why) != is_enough
