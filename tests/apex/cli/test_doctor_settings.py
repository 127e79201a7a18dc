"""Which settings of the papers run, by made-up machines."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from apex.cli import doctor
from apex.simulator.paper_settings import setting_lines, setting_names
from swiftllm.machine import GIB


def lines(product_name: str, device_gib: float, host_gib: float) -> dict[str, tuple[str, str]]:
    found = list(setting_lines(product_name, int(device_gib * GIB), int(host_gib * GIB)))
    assert [name for name, _, _ in found] == list(setting_names())
    return {name: (what, status) for name, what, status in found}


def test_the_papers_t4_runs_its_settings():
    found = lines("Tesla T4", 14.56, 60)
    for name in ("apex-t4", "neo-t4"):
        what, status = found[name]
        assert status == "ok"
        assert what.startswith("meta-llama/Llama-2-7b-hf, 54 GPU blocks, of ")
        assert what.endswith("host memory holds 20.0 of 20 GB of KV cache")
    needed = "needs another GPU: A10 with 24 GB, and this is Tesla T4 with 15.6 GB"
    assert found["apex-a10"] == found["neo-a10"] == (needed, "note")
    assert found["omniserve-yi-34b"][0].startswith("can only be simulated: it has 2x A100-SXM-80GB")


@pytest.mark.parametrize("product", ["NVIDIA A10G", "NVIDIA A10"])
def test_an_a10_in_a_small_host_holds_part_of_the_cache(product):
    found = lines(product, 22.06, 60)
    what, status = found["apex-a10"]
    assert status == "note" and what.endswith("holds only 60.0 of 120 GB of KV cache")
    assert found["neo-a10"][1] == "ok" and "30 GB" in found["neo-a10"][0]
    assert found["apex-t4"] == (f"needs another GPU: T4 with 16 GB, and this is {product} with 23.7 GB", "note")


def test_another_card_gets_the_nearest_workload_with_its_own_pools():
    found = lines("NVIDIA L4", 21.95, 200)
    what, status = found["apex-a10"]
    assert status == "note" and "NVIDIA L4 instead of A10: same workload, up to 2,1" in what
    assert what.endswith("holds 120.0 of 120 GB of KV cache")
    assert found["apex-t4"][0].startswith("needs another GPU")


def test_a_card_too_small_says_by_how_much():
    found = lines("NVIDIA GeForce RTX 3060", 11.64, 200)
    assert {status for _, status in found.values()} == {"note"}
    what = found["apex-t4"][0]
    assert "the GPU has 11.64 GiB" in what and "weights 12.55 GiB" in what and "--weights-gpu-memory auto" in what


def test_the_section_follows_the_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (finding,) = doctor.settings()
    assert finding.status == "note" and "`--setting small`" in finding.found
    card = SimpleNamespace(name="Tesla T4", total_memory=int(14.56 * GIB))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(doctor, "available_host_bytes", lambda: 60 * GIB)
    findings = {finding.what: finding for finding in doctor.settings()}
    assert findings["apex-t4"].status == "ok" and findings["apex-a10"].status == "note"
