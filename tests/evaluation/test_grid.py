"""Grids: axes, variants, and what is refused."""

from __future__ import annotations

import pytest

from evaluation.grid import Grid

KNOWN = ("panel", "setting", "system", "output_len", "num_requests", "read_gb_s", "kernel")
SECTION = {
    "shows": "words",
    "system": ["swiftllm", "adaptive"],
    "quick": {"num_requests": 40},
    "panels": [
        {"panel": "a", "output_len": [50, 200], "num_requests": 300, "sensitivity": {"output_len": [200]}},
        {"panel": "b", "system": ["neo"], "num_requests": 500, "quick": {"num_requests": 20}},
    ],
}


def read(variant: str | None = None, section: dict = SECTION) -> Grid:
    return Grid.read(section, KNOWN, variant, notes=["shows"])


def values(grid: Grid, *fields: str) -> list[tuple]:
    return [tuple(place.get(field) for field in fields) for place in grid.places()]


def test_lists_are_axes_and_the_fields_of_the_section_vary_fastest():
    assert values(read(), "panel", "output_len", "system", "num_requests") == [
        ("a", 50, "swiftllm", 300),
        ("a", 50, "adaptive", 300),
        ("a", 200, "swiftllm", 300),
        ("a", 200, "adaptive", 300),
        ("b", None, "neo", 500),
    ]
    assert "shows" not in read().places()[0]


def test_a_section_without_panels_is_one():
    assert Grid.read({"panel": "a", "output_len": [1, 2]}, KNOWN).places() == [
        {"panel": "a", "output_len": 1},
        {"panel": "a", "output_len": 2},
    ]


def test_variants_are_laid_over_panels_those_of_a_panel_last():
    assert values(read("quick"), "panel", "num_requests") == [("a", 40)] * 4 + [("b", 20)]
    assert values(read("sensitivity"), "panel", "output_len") == [("a", 200)] * 2 + [("b", None)]
    assert values(read("rehearsal"), "panel", "num_requests") == values(read(), "panel", "num_requests")


def test_a_mapping_sets_several_fields_and_what_is_laid_over_wins():
    sizes = [{"output_len": 25, "num_requests": 800}, {"output_len": 600, "num_requests": 240}]
    grid = Grid.read({"size": sizes, "quick": {"num_requests": 120}}, KNOWN)
    assert grid.places() == [{"output_len": 25, "num_requests": 800}, {"output_len": 600, "num_requests": 240}]
    assert values(grid.with_(num_requests=120), "output_len", "num_requests") == [(25, 120), (600, 120)]
    assert values(grid.with_(output_len=7), "output_len", "num_requests") == [(7, 800), (7, 240)]


def test_other_values_keep_the_place_of_their_axis_and_new_ones_come_last():
    grid = read().only("panel", ["a"]).with_(output_len=range(1, 3), kernel=["x", "y"])
    assert values(grid, "output_len", "system", "kernel")[:5] == [
        (1, "swiftllm", "x"),
        (1, "swiftllm", "y"),
        (1, "adaptive", "x"),
        (1, "adaptive", "y"),
        (2, "swiftllm", "x"),
    ]


def test_only_keeps_panels_and_entries_of_axes():
    assert values(read().only("output_len", [200]), "panel", "output_len") == [("a", 200)] * 2
    assert values(read().only("system", ["neo", "adaptive"]), "panel", "system") == [
        ("a", "adaptive"),
        ("a", "adaptive"),
        ("b", "neo"),
    ]
    assert read().only("system", None) == read()
    assert values(
        read().only("size", ["big"], lambda panel: "big" if panel["num_requests"] > 300 else "small"), "panel"
    )
    with pytest.raises(ValueError, match="no panel c, d in the experiment file; there are a, b"):
        read().only("panel", ["a", "c", "d"])


def test_a_point_that_does_not_depend_on_a_field_is_there_once():
    grid = read().only("panel", ["a"]).with_(read_gb_s=[20, 30], kernel=["own", "native"])
    places = grid.places(lambda field, place: field != "read_gb_s" or place["system"] != "swiftllm")
    here = [(place["system"], place["read_gb_s"], place["kernel"]) for place in places if place["output_len"] == 50]
    assert here == [
        ("swiftllm", None, "own"),
        ("swiftllm", None, "native"),
        ("adaptive", 20, "own"),
        ("adaptive", 20, "native"),
        ("adaptive", 30, "own"),
        ("adaptive", 30, "native"),
    ]
    fixed = grid.with_(read_gb_s=20).places(lambda field, place: False)
    assert {place["read_gb_s"] for place in fixed} == {20}, "what is no axis is of the panel, whoever it concerns"


UNKNOWN = {
    "sytem": {"sytem": ["neo"]},
    "output_lens": {"panels": [{"panel": "a", "output_lens": [50]}]},
    "requests": {"quick": {"requests": 40}},
    "number": {"panels": [{"panel": "a", "sizes": [{"output_len": 50, "number": 3}]}]},
    "outputs": {"panels": [{"panel": "a", "quick": {"outputs": 3}}]},
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_names_are_refused(name):
    with pytest.raises(ValueError, match=f"file has no {name} in its panels; they may have quick, .*kernel"):
        read(section={**SECTION, **UNKNOWN[name]})
