"""The picture of a timeline: its words, rows, legend and enlarged part."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from apex.timeline.figure import box_text, chart_tracks, draw_timeline, zoom_window
from apex.timeline.spans import Kind, Span, Timeline
from tests.apex.timeline.recorded import LAYERS


def test_the_picture_says_what_it_shows(overlap: Timeline, pipelining: Timeline) -> None:
    words = " ".join(text.get_text() for text in draw_timeline(overlap).texts)
    assert "apex: asynchronous overlap" in words and "SIMULATED" in words
    measured = draw_timeline(replace(overlap, simulated=False))
    words = " ".join(text.get_text() for text in measured.texts)
    assert "measured" in words and "SIMULATED" not in words
    assert "milliseconds" in measured.axes[1].get_xlabel()
    titles = [track.title for track in chart_tracks(overlap)]
    assert "PCIe\nto host" in titles and "CPU:\nattention" in titles
    assert any("own stages" in track.title for track in chart_tracks(pipelining))
    boxes = [text.get_text() for text in draw_timeline(pipelining).axes[1].texts]
    assert len(boxes) > 10 and any(text.startswith("A ") for text in boxes)


def test_the_picture_tells_joining_from_stepping(free_running: Timeline, overlap: Timeline) -> None:
    figure = draw_timeline(free_running)
    words = " ".join(text.get_text() for text in figure.texts)
    assert (
        "asynchronous overlap (free running)" in words
        and "joins at the GPU batch's layer and runs alone elsewhere" in words
    )
    assert any("(free-running)" in text.get_text() for text in figure.axes[0].texts)
    labels = " ".join(text.get_text() for text in figure.legends[0].get_texts())
    joins, steps = (free_running.crossings(0, kind) for kind in (Kind.LINEAR, Kind.STEP))
    assert f"; {joins} joins, {steps} stages alone" in labels
    assert any("own stages" in track.title for track in chart_tracks(free_running))
    start_s, end_s = zoom_window(free_running)
    shown = [span for span in free_running.spans if span.cpu_batches and start_s <= span.start_s < end_s]
    assert {Kind.LINEAR, Kind.STEP} <= {span.kind for span in shown}, "one of the two is not enlarged"
    assert legend_inches(figure) < figure.get_size_inches()[0]
    cpu_batches = [tuple(replace(tag, slot=span.index % 3) for tag in span.cpu_batches) for span in free_running.spans]
    spans = tuple(replace(span, cpu_batches=tags) for span, tags in zip(free_running.spans, cpu_batches, strict=True))
    crowded = draw_timeline(replace(free_running, spans=spans))
    assert legend_inches(crowded) < crowded.get_size_inches()[0] and len(crowded.legends[0].get_texts()) >= 5
    other = draw_timeline(overlap)
    assert "free" not in " ".join(text.get_text() for text in (*other.texts, *other.legends[0].get_texts()))


def legend_inches(figure: Figure) -> float:
    return figure.legends[0].get_window_extent(FigureCanvasAgg(figure).get_renderer()).width / figure.dpi


def test_the_enlarged_part_lies_in_one_iteration_and_has_a_crossing(overlap: Timeline) -> None:
    start_s, end_s = zoom_window(overlap)
    inside = [span for span in overlap.spans if span.kind is Kind.LINEAR and start_s <= span.start_s < end_s]
    assert len({span.iteration for span in inside}) == 1 and len(inside) == 8
    assert any(span.cpu_batches for span in inside)


def test_labels_fit_their_boxes() -> None:
    span = Span(0, Kind.LINEAR, 0.0, 1.0, 0, layer=17)
    assert box_text(span, LAYERS * 2, 100.0) == "17" and box_text(span, LAYERS * 2, 5.0) == ""
    assert box_text(replace(span, layer=-1), LAYERS, 100.0) == "E"


def test_an_empty_timeline_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_timeline(Timeline("apex", "here", True, LAYERS, (), (), ()))


def test_the_legend_has_the_first_size_of_the_gpu_batch_and_of_each_cpu_batch(overlap: Timeline) -> None:
    numbers = itertools.count(1001)
    spans = tuple(replace(span, work=replace(span.work, requests=next(numbers))) for span in overlap.spans)
    timeline = replace(overlap, spans=spans)
    words = " ".join(text.get_text() for text in draw_timeline(timeline).legends[0].get_texts())
    shown = [next(span for span in spans if span.kind is Kind.ATTENTION)]
    for slot in sorted({tag.slot for span in spans if span.kind is Kind.CPU_ATTENTION for tag in span.cpu_batches}):
        shown.append(next(s for s in spans if s.kind is Kind.CPU_ATTENTION and s.cpu_batches[0].slot == slot))
    assert len(shown) > 1
    assert [int(number) for number in re.findall(r"(1\d{3}) requests", words)] == [s.work.requests for s in shown]
