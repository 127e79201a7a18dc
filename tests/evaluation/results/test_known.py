"""What figures say of simulated rows: how well the card is known, and which vLLM is meant."""

from __future__ import annotations

from evaluation.plots.notes import known_notes


def row(**fields: object) -> dict[str, object]:
    return {"backend": "simulated", "gpu": "T4", "model": "llama-2-7b", "system": "apex", **fields}


def test_each_card_is_described_once() -> None:
    rows = [row(), row(system="neo"), row(gpu="2x A10", model="llama-3.1-8b"), row(gpu="this CPU", model="any")]
    notes = known_notes(rows)
    assert notes == [
        "T4 is known from linear layers measured (Llama-2-7b-hf); attention from assumed figures.",
        "A10 is known from linear layers measured (Meta-Llama-3-8B); attention from assumed figures.",
    ]
    assert known_notes([row(backend="torch")]) == []


def test_it_is_said_which_vllm_is_meant() -> None:
    (_, papers), (_, today) = (known_notes([row(system="vllm", **now)]) for now in ({}, {"vllm_defaults": True}))
    assert papers == "vllm: as the papers ran it, without prefix cache, asynchronous scheduling and reservation."
    assert today.startswith("vllm: vLLM 0.19 with its defaults")
