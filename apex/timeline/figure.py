"""Draws a timeline as a Gantt chart: an overview of the whole window above, some of its layers enlarged below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from apex.timeline.spans import Iteration, Kind, Span, SpanWork, Timeline

ZOOM_LAYERS = 8

WIDTH_INCHES = 13.0
GPU_BATCH_LINEAR, GPU_BATCH_ATTENTION = "#A6A6A6", "#D6D6D6"
# Okabe and Ito's colours: distinct for every common kind of colour vision.
CPU_BATCH_COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#D55E00", "#F0E442")
SWAP, HOST_WORK = "#7A6A9B", "#C8B695"
ZOOM_COLOUR = "#FFF3CC"
INK, FAINT = "#222222", "#666666"

ROW_HEIGHT = 0.76
LABEL_POINTS = 7.0
LEAST_WAIT_POINTS = 2.0
POINTS_PER_CHARACTER = 0.62 * LABEL_POINTS
LEGEND_POINTS = 8.0
LETTER_EMS, LEGEND_ENTRY_EMS = 0.56, 4.0
"""Widths in font sizes: of a letter of the legend, and of an entry's symbol with the space around it."""


@dataclass(frozen=True)
class Track:
    """A row of the chart and its kinds of spans; a row of own stages belongs to one CPU batch slot."""

    title: str
    kinds: tuple[Kind, ...]
    slot: int | None = None

    def shows(self, span: Span) -> bool:
        return span.kind in self.kinds and (self.slot is None or span.cpu_batches[0].slot == self.slot)


def draw_timeline(timeline: Timeline) -> Figure:
    """Draw the chart. Boxes show their layer where it fits; each CPU batch slot has a colour.

    Raises:
        ValueError: the timeline is empty.
    """
    if not timeline.iterations or not timeline.spans:
        raise ValueError("nothing to draw: no iteration was recorded")
    tracks, zoom = chart_tracks(timeline), zoom_window(timeline)
    # From the top down, in inches: texts, overview, gap, detail, legend and note.
    heights = (0.98, 0.19 * len(tracks), 0.58, 0.44 * len(tracks), 1.08)
    height = sum(heights)
    figure = Figure(figsize=(WIDTH_INCHES, height))

    def add_chart(top: float, chart_height: float) -> Axes:
        return figure.add_axes((0.105, 1 - (top + chart_height) / height, 0.88, chart_height / height))

    overview, detail = add_chart(heights[0], heights[1]), add_chart(sum(heights[:3]), heights[3])
    zero_s = timeline.iterations[0].start_s
    draw_tracks(overview, timeline, tracks, (zero_s, timeline.iterations[-1].end_s), zero_s, labels=False)
    draw_tracks(detail, timeline, tracks, zoom, zero_s, labels=True)
    overview.xaxis.set_major_formatter("{x:g} ms")
    mark_iterations(overview, timeline.iterations, zero_s)
    edges_ms = [(edge_s - zero_s) * 1e3 for edge_s in zoom]
    overview.axvspan(*edges_ms, color=ZOOM_COLOUR, zorder=0, linewidth=0)
    for edge_ms in edges_ms:
        overview.axvline(edge_ms, color=INK, linewidth=1.0)
    unit = "simulated milliseconds" if timeline.simulated else "milliseconds"
    detail.set_xlabel(f"{unit} since the first iteration shown", fontsize=8.5, color=FAINT)
    explanation = "the marked part enlarged; numbers are layers, E is the embedding, L the logits"
    detail.set_title(explanation, loc="left", fontsize=8.5, color=FAINT, pad=3)
    write_texts(figure, timeline, height)
    draw_legend(figure, timeline, height)
    return figure


# -- layout -----------------------------------------------------------------------------------------------------------


def chart_tracks(timeline: Timeline) -> list[Track]:
    """The rows that have a span, top to bottom."""
    slots = sorted({span.cpu_batches[0].slot for span in timeline.spans if span.kind is Kind.STEP})
    letters = {tag.slot: tag.letter for span in timeline.spans for tag in span.cpu_batches}
    tracks = [
        Track("GPU batch:\nlinear layers", (Kind.LINEAR, Kind.WAIT, Kind.SWAP_WAIT, Kind.OTHER)),
        Track("GPU batch:\nattention", (Kind.ATTENTION,)),
        *(Track(f"CPU batch {letters[slot]}:\nown stages", (Kind.STEP,), slot) for slot in slots),
        Track("CPU:\nattention", (Kind.CPU_ATTENTION,)),
        Track("PCIe\nto host", (Kind.TO_HOST,)),
        Track("PCIe\nto GPU", (Kind.TO_GPU,)),
        Track("swaps", (Kind.SWAP,)),
    ]
    return [track for track in tracks if any(track.shows(span) for span in timeline.spans)]


def zoom_window(timeline: Timeline) -> tuple[float, float]:
    """The window to enlarge, in seconds: consecutive layers of one iteration, with the most work of CPU batches.

    Windows in which CPU batches both join and run alone come first, and of equal ones the middle one. It reaches from
    the start of one stage of the GPU batch to the start of another; with an empty GPU batch stages of CPU batches
    count.
    """
    crossings = [span for span in timeline.spans if span.kind in (Kind.LINEAR, Kind.STEP)]
    gpu_batch = [span for span in crossings if span.kind is Kind.LINEAR] or crossings
    futures = [span for span in timeline.spans if span.kind is Kind.CPU_ATTENTION]
    candidates = []
    for first, last in zip(gpu_batch, gpu_batch[ZOOM_LAYERS - 1 :], strict=False):
        if first.iteration == last.iteration:
            inside = [span for span in (*crossings, *futures) if first.start_s <= span.start_s <= last.end_s]
            kinds = {span.kind for span in inside if span.cpu_batches}
            candidates.append(((len(kinds), sum(len(span.cpu_batches) for span in inside)), first.start_s, last))
    if not candidates:  # a model of few layers
        return timeline.iterations[0].start_s, timeline.iterations[0].end_s
    most = max(worth for worth, _, _ in candidates)
    best = [(start_s, last) for worth, start_s, last in candidates if worth == most]
    start_s, last = best[len(best) // 2]
    after = [span.start_s for span in gpu_batch if span.start_s > last.start_s and span.iteration == last.iteration]
    end_s = after[0] if after else next(i.end_s for i in timeline.iterations if i.index == last.iteration)
    return start_s, end_s


# -- boxes ------------------------------------------------------------------------------------------------------------


def draw_tracks(
    ax: Axes, timeline: Timeline, tracks: Sequence[Track], window: tuple[float, float], zero_s: float, *, labels: bool
) -> None:
    """Draw the spans of the window, cut off at its edges."""
    start_s, end_s = window
    points_per_s = width_points(ax) / (end_s - start_s)
    for place, track in enumerate(tracks):
        y = len(tracks) - 1 - place
        for span in timeline.spans:
            if not track.shows(span) or span.end_s <= start_s or span.start_s >= end_s:
                continue
            if span.kind is Kind.WAIT and span.duration_s * points_per_s < LEAST_WAIT_POINTS:
                continue  # collecting a result that is ready takes microseconds
            left_s, right_s = max(span.start_s, start_s), min(span.end_s, end_s)
            draw_box(ax, span, (left_s - zero_s) * 1e3, (right_s - left_s) * 1e3, y, labels)
            text = box_text(span, timeline.num_layers, (right_s - left_s) * points_per_s) if labels else ""
            if text:
                middle_ms = ((left_s + right_s) / 2 - zero_s) * 1e3
                up = 0.12 if span.kind is Kind.LINEAR and span.cpu_batches else 0.0
                ax.text(
                    middle_ms, y + up, text, ha="center", va="center", fontsize=LABEL_POINTS, color=INK, clip_on=True
                )
    for poll in timeline.polls:
        if start_s <= poll.time_s < end_s:
            at = (poll.time_s - zero_s) * 1e3, len(tracks) - 1
            size = {"markersize": 6, "markeredgewidth": 2.0} if labels else {"markersize": 4, "markeredgewidth": 1.2}
            ax.plot(*at, marker="x", color=cpu_batch_colour(poll.cpu_batch.slot), **size, clip_on=False)
    ax.set_xlim((start_s - zero_s) * 1e3, (end_s - zero_s) * 1e3)
    ax.set_ylim(-0.55, len(tracks) - 0.4)
    titles = [track.title if labels else track.title.replace("\n", " ") for track in tracks]
    ax.set_yticks(range(len(tracks) - 1, -1, -1), titles, fontsize=8.5 if labels else 6.5, linespacing=1.0)
    ax.tick_params(axis="y", length=0)
    ax.tick_params(axis="x", labelsize=8, colors=FAINT)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.set_axisbelow(True)
    for y in range(len(tracks)):
        ax.axhline(y - 0.5, color="#EEEEEE", linewidth=0.8, zorder=0)


def draw_box(ax: Axes, span: Span, left_ms: float, width_ms: float, y: int, outlined: bool) -> None:
    colour, hatch = box_style(span)
    edge = {"edgecolor": "#FFFFFF" if hatch is None else FAINT, "linewidth": 0.7 if outlined else 0.0}
    place = (left_ms, y - ROW_HEIGHT / 2)
    ax.add_patch(Rectangle(place, width_ms, ROW_HEIGHT, facecolor=colour, hatch=hatch, **edge))
    if span.kind is Kind.LINEAR:  # a stripe for each joined CPU batch at the foot of the GPU batch's box
        stripe = ROW_HEIGHT * 0.36 / max(1, len(span.cpu_batches))
        for number, tag in enumerate(span.cpu_batches):
            foot = (left_ms, y - ROW_HEIGHT / 2 + number * stripe)
            ax.add_patch(Rectangle(foot, width_ms, stripe, facecolor=cpu_batch_colour(tag.slot), **edge))


def box_style(span: Span) -> tuple[str, str | None]:
    """Fill colour and hatching."""
    gpu_batch = {
        Kind.LINEAR: GPU_BATCH_LINEAR,
        Kind.ATTENTION: GPU_BATCH_ATTENTION,
        Kind.SWAP: SWAP,
        Kind.OTHER: HOST_WORK,
    }
    if span.kind in (Kind.WAIT, Kind.SWAP_WAIT):
        return "#FFFFFF", "////"
    return gpu_batch.get(span.kind) or cpu_batch_colour(span.cpu_batches[0].slot), None


def cpu_batch_colour(slot: int) -> str:
    return CPU_BATCH_COLOURS[slot % len(CPU_BATCH_COLOURS)]


def box_text(span: Span, num_layers: int, room: float) -> str:
    """The longest text of a box that fits ``room`` points; empty if none does."""
    if span.kind in (Kind.WAIT, Kind.SWAP_WAIT, Kind.OTHER):
        return ""
    letters = "+".join(tag.letter for tag in span.cpu_batches)
    ends: dict[int | None, str] = {-1: "E", num_layers - 1: "L"}
    layer = ends.get(span.layer) if span.kind in (Kind.LINEAR, Kind.STEP) else None
    layer = layer or str("" if span.layer is None else span.layer)
    if span.kind is Kind.SWAP:
        texts = [f"{span.work.requests} requests", str(span.work.requests)]
    elif span.kind in (Kind.LINEAR, Kind.ATTENTION):
        texts = [f"{layer} + {letters}", layer] if letters else [layer]
    else:
        texts = [f"{letters}: layer {layer}, {span.work.requests} requests", f"{letters}: layer {layer}"]
        texts += [f"{letters} {layer}", layer]
    return next((text for text in texts if (len(text) + 1) * POINTS_PER_CHARACTER <= room), "")


def mark_iterations(ax: Axes, iterations: Sequence[Iteration], zero_s: float) -> None:
    """Mark the start of each iteration and describe it above, as far as it fits."""
    (left, right), top = ax.get_xlim(), ax.get_ylim()[1]
    points_per_ms = width_points(ax) / (right - left)
    for iteration in iterations:
        left_ms, right_ms = ((time_s - zero_s) * 1e3 for time_s in (iteration.start_s, iteration.end_s))
        ax.axvline(left_ms, color=FAINT, linewidth=0.8, linestyle=(0, (4, 3)))
        first = f"iteration {iteration.index}: {iteration.title}"
        second = f"{right_ms - left_ms:.1f} ms"
        if iteration.predicted_s is not None:
            second += f", predicted {iteration.predicted_s * 1e3:.1f}"
        texts = (f"{first}\n{second}", f"{iteration.index}\n{right_ms - left_ms:.1f} ms")
        room = (right_ms - left_ms) * points_per_ms
        text = next((text for text in texts if max(map(len, text.split("\n"))) * POINTS_PER_CHARACTER < room), "")
        middle_ms = (left_ms + right_ms) / 2
        ax.text(middle_ms, top, text, ha="center", va="bottom", fontsize=7.5, color=FAINT, linespacing=1.15)


def width_points(ax: Axes) -> float:
    figure = ax.get_figure(root=True)
    assert figure is not None
    return figure.get_size_inches()[0] * 72 * ax.get_position().width


# -- texts ------------------------------------------------------------------------------------------------------------

NOTE = (
    "GPU batch: requests that go straight through all layers. CPU batch: requests whose KV cache is in host memory, "
    "where the CPU computes their attention;\ntheir linear layers run together with the GPU batch's (coloured foot of "
    "a box) or alone (own stages). Linear box i is the work between attention i and attention i+1."
)

FREE_RUNNING_NOTE = " A free-running CPU batch joins at the GPU batch's layer and runs alone elsewhere."


def write_texts(figure: Figure, timeline: Timeline, height: float) -> None:
    strategies = ", ".join(title.replace("-", " ") for title in timeline.strategies)
    how = "SIMULATED: predicted times" if timeline.simulated else "measured"
    title, setting = f"{timeline.system}: {strategies}", f"{timeline.setting}; {how}"
    figure.text(0.01, 1 - 0.09 / height, title, fontsize=13, fontweight="bold", va="top", color=INK)
    figure.text(0.01, 1 - 0.37 / height, setting, fontsize=9, va="top", color=FAINT)
    note = NOTE + (FREE_RUNNING_NOTE if any(i.free_running for i in timeline.iterations) else "")
    figure.text(0.01, 0.07 / height, note, fontsize=7.5, va="bottom", color=FAINT, linespacing=1.3)


def draw_legend(figure: Figure, timeline: Timeline, height: float) -> None:
    """The colours, and the first recorded size of the GPU batch and of each CPU batch."""
    gpu_batch = next((span for span in timeline.spans if span.kind is Kind.ATTENTION), None)
    what = "GPU batch" if gpu_batch is None else f"GPU batch: {work_text(gpu_batch.work)}"
    handles: list[Patch | Line2D] = [Patch(color=GPU_BATCH_LINEAR, label=what)]
    first = {span.cpu_batches[0].slot: span for span in reversed(timeline.spans) if span.kind is Kind.CPU_ATTENTION}
    for slot, span in sorted(first.items()):
        text = f"CPU batch {span.cpu_batches[0].letter}: {work_text(span.work)}{crossings_text(timeline, slot)}"
        handles.append(Patch(color=cpu_batch_colour(slot), label=text))
    if any(span.kind is Kind.OTHER for span in timeline.spans):
        handles.append(Patch(color=HOST_WORK, label="host work"))
    if any(span.kind is Kind.WAIT for span in timeline.spans):
        handles.append(
            Patch(facecolor="#FFFFFF", edgecolor=FAINT, hatch="////", label="GPU batch waits for a CPU batch")
        )
    if timeline.polls:
        handles.append(
            Line2D([], [], color=INK, marker="x", linestyle="", label="CPU batch not ready: GPU batch goes on")
        )
    where = {"loc": "lower left", "bbox_to_anchor": (0.004, 0.34 / height), "ncols": len(handles)}
    ems = sum(LETTER_EMS * len(str(handle.get_label())) + LEGEND_ENTRY_EMS for handle in handles)
    size = min(LEGEND_POINTS, 72 * WIDTH_INCHES / ems)  # several CPU batches need more room than one
    figure.legend(handles=handles, **where, frameon=False, fontsize=size, handlelength=1.4, columnspacing=1.6)


def crossings_text(timeline: Timeline, slot: int) -> str:
    """How often CPU batches of a slot joined and stepped, where a free-running one chose between both."""
    if not any(iteration.free_running for iteration in timeline.iterations):
        return ""
    joins, alone = (timeline.crossings(slot, kind) for kind in (Kind.LINEAR, Kind.STEP))
    return f"; {counted(joins, 'join')}, {counted(alone, 'stage')} alone"


def work_text(work: SpanWork) -> str:
    context = f"{work.context_tokens / 1000:.1f}k" if work.context_tokens >= 10_000 else str(work.context_tokens)
    tokens = f" ({work.tokens} tokens)" if work.tokens != work.requests else ""
    return f"{counted(work.requests, 'request')}{tokens}, {context} tokens of context"


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"
