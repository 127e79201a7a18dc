"""Kinds of rows: what is simulated, measured in a paper's setting or of another model, and what is never mixed."""

from __future__ import annotations

import pytest

from evaluation.results.rows import claimable, comparisons, in_papers_setting, is_full_size, kind_of, label_of

SIMULATED = {"backend": "simulated", "setting": "apex-t4", "gpu": "T4"}
OURS = {"backend": "torch-cuda", "setting": "apex-t4", "setting_title": "T4 + Llama-2-7B", "gpu": "Tesla T4"}
SERVER = OURS | {"backend": "server", "system": "vllm"}
SMALL = {"backend": "torch-cpu", "setting": None}
HTTP = {"backend": "http"}


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        (SIMULATED, "simulated"),
        (OURS, "measured here"),
        (SERVER, "measured here"),
        (SMALL, "measured here"),
        (HTTP, "measured over HTTP"),
        ({"backend": "measured: CPU attention speed"}, "measured here"),
        ({"backend": None}, "origin not stated"),
        ({}, "origin not stated"),
    ],
)
def test_a_row_says_what_it_is(record, kind):
    assert kind_of(record) == kind


def test_a_server_started_here_is_compared_with_the_engines_and_nothing_else_is_mixed():
    rows = [SIMULATED, OURS, SMALL, SERVER, HTTP]
    assert comparisons(rows) == [[SIMULATED], [OURS, SERVER], [SMALL], [HTTP]]
    assert [in_papers_setting(row) for row in rows] == [False, True, False, True, False]


def test_labels_name_setting_and_card_or_another_model():
    labels = [label_of(group) for group in comparisons([SIMULATED, OURS, SMALL, SERVER, HTTP])]
    assert labels == [
        "SIMULATED",
        "MEASURED here (T4 + Llama-2-7B, Tesla T4)",
        "MEASURED here (torch-cpu, another model)",
        "MEASURED over HTTP",
    ]


def test_only_rows_of_a_papers_model_and_lengths_on_a_gpu_speak_of_its_claims():
    """Simulated ones and those of another model are of comparisons of their own, which say so."""
    full = OURS | {"scale": 1, "papers_model": True}
    assert is_full_size(full) and is_full_size(OURS)
    less = [{"scale": 0.5}, {"papers_model": False}, {"gpu": None}, {"backend": "simulated"}]
    assert not any(is_full_size(full | change) for change in less)
    kernel = {"backend": "measured: CPU attention speed", "kernel": "native", "setting": "apex-t4"}
    assert is_full_size(kernel) and not is_full_size(kernel | {"backend": "simulated"})
    part = full | {"papers_model": False}
    assert claimable([SIMULATED, part, SMALL]) == [[SIMULATED], [SMALL]]
    assert claimable([part, full]) == [[part, full]]
