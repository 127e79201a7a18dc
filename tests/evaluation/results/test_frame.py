"""Which row a row is compared with, and what it takes from the frame."""

from __future__ import annotations

import json

import pytest

from evaluation.results.rows import bases, frame_of, over, with_columns

ROWS = [
    {"system": "vllm", "case": "a", "rate": None, "tokens_per_s": 4, "requests": 1},
    {"system": "neo", "case": "a", "rate": None, "tokens_per_s": 6, "requests": 1},
    {"system": "neo", "case": "a", "rate": 2.0, "tokens_per_s": None, "requests": None},
    {"system": "vllm", "case": "b", "rate": 2.0, "tokens_per_s": 0, "requests": 1},
    {"system": "neo", "case": "b", "rate": 2.0, "tokens_per_s": 5, "requests": 1},
]


def test_none_is_a_value_where_rows_must_be_equal_and_any_value_where_they_need_not() -> None:
    frame = frame_of(ROWS)
    is_vllm = frame["system"] == "vllm"
    assert bases(frame, is_vllm, ["case", "rate"]).dropna().to_dict() == {0: 0, 1: 0, 3: 3, 4: 3}
    assert bases(frame, is_vllm, ["case"], any_of=["rate"]).dropna().to_dict() == {0: 0, 1: 0, 2: 0, 3: 3, 4: 3}


def test_rows_keep_their_values_and_get_plain_ones() -> None:
    frame = frame_of(ROWS)
    base = bases(frame, frame["system"] == "vllm", ["case"])
    completed = with_columns(ROWS, ratio=over(frame["tokens_per_s"], base), to=base.map(frame["system"]))
    assert [row["ratio"] for row in completed] == [1.0, 1.5, None, None, None]  # nothing over None, and none over 0
    assert [{name: row[name] for name in ROWS[0]} for row in completed] == ROWS
    assert '"requests": null, "ratio": null, "to": "vllm"' in json.dumps(completed)


def test_several_rows_that_fit_are_an_error_unless_the_best_is_asked_for() -> None:
    rows = [{"system": name, "case": "a", "rate": rate} for name, rate in (("x", 1.0), ("y", 3.0), ("z", 3.0))]
    frame = frame_of(rows)
    anyone = frame["system"].notna()
    with pytest.raises(ValueError, match=r"several rows to compare with at \{'case': 'a'\}"):
        bases(frame, anyone, ["case"])
    assert list(bases(frame, anyone, ["case"], best=frame["rate"])) == [1, 1, 1]
    assert bases(frame, anyone, ["case"], lines=~anyone).isna().all()  # nor where none is compared
