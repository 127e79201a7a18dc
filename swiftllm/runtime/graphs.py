"""Boundaries and decode attention as captured graphs: one launch each instead of a dozen.

A graph computes on the memory it was captured on, and as many rows as it was captured with. So there are graphs for
some numbers of rows, buckets, and a batch takes the smallest that holds it; the rows behind it hold what was there
before, which is row by row worth nothing and harms nobody, since no operation mixes rows and empty contexts store
nothing. All buckets share one set of buffers, a frame.

All graphs are captured before anything is served: what goes wrong with them goes wrong at once, no request waits for a
capture, no copy of the attention worker is under way beside one, and the memory they take is known.

A lane lives in the frame while it crosses layers, so that nothing is copied between its graphs. Cohorts come and go:
their rows are copied behind the lane's when they board, and back out after. Cohorts that cross without a lane have a
frame of their own, so that the lane stays where it is.
"""

from __future__ import annotations

import gc
import itertools
import time
import warnings
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from swiftllm.device.device import Device, Graph
from swiftllm.model.llama import LlamaModel
from swiftllm.runtime.batch import LaneBatch, Rows
from swiftllm.sampling.draws import most_likely

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)  # beyond, launching is a small part of the work
BLOCK_BUCKETS = (16, 64, 256, 1024)  # widths of block tables; programs beyond a context end at once, but are launched


class Frame:
    """What graphs read and write, for up to ``rows`` rows."""

    def __init__(self, rows: int, model: LlamaModel, dtype: torch.dtype, max_blocks: int) -> None:
        config, device = model.config, model.rotary_table.device

        def buffer(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=device)

        self.token_ids = buffer(dtype=torch.int64)
        self.rotary_rows = buffer(2, config.head_dim, dtype=torch.float32)
        self.residual = buffer(config.hidden_size)
        self.qkv = buffer(config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        self.attention_out = buffer(config.num_heads, config.head_dim)
        self.block_tables = buffer(max_blocks, dtype=torch.int32)
        self.seq_lens = buffer(dtype=torch.int32)
        self._lane: Callable[[], LaneBatch | None] = lambda: None

    def holds(self, lane: LaneBatch) -> bool:
        return self._lane() is lane

    def seat(self, lane: LaneBatch) -> None:
        """Move a lane in: from here on its tensors are the frame's first rows."""
        if self.holds(lane):
            return
        self.clear()
        rows = lane.num_rows
        for name in ("token_ids", "rotary_rows", "residual", "qkv", "attention_out"):
            own, place = getattr(lane, name), getattr(self, name)[:rows]
            if own is not None:
                place.copy_(own)
            setattr(lane, name, place)
        if lane.decodes is not None and not lane.prefills:
            tables = lane.decodes.block_tables[:, : self.block_tables.shape[1]]
            self.block_tables[:rows, : tables.shape[1]].copy_(tables)
            self.seq_lens.zero_()
            self.seq_lens[:rows].copy_(lane.decodes.seq_lens)
        self._lane = weakref.ref(lane)

    def clear(self) -> None:
        """Give a lane that is still needed memory of its own."""
        lane = self._lane()
        if lane is not None:
            for name in ("token_ids", "rotary_rows", "residual", "qkv", "attention_out"):
                setattr(lane, name, getattr(lane, name).clone())
        self._lane = lambda: None

    def board(self, batch: Rows, rows: slice) -> None:
        """Copy in what a batch brings to its boundary."""
        self.rotary_rows[rows].copy_(batch.rotary_rows)
        if batch.residual is None:
            self.token_ids[rows].copy_(batch.token_ids)
        else:
            self.residual[rows].copy_(batch.residual)
            self.attention_out[rows].copy_(batch.attention_out)


WHOLE = -2  # in place of a layer: a whole iteration of a lane


class GraphKey(NamedTuple):
    """``blocks``: width of the block tables for decode attention; 0: the boundary after ``layer``."""

    frame: Frame
    layer: int
    rows: int
    blocks: int


class LayerGraphs:
    """Graphs of the boundaries and of decode attention, and of all of them in a row where nobody boards on the way.

    Attributes: ``seconds`` that capturing took, and ``num_bytes`` of the device's memory that it left taken.
    """

    def __init__(
        self, device: Device, model: LlamaModel, dtype: torch.dtype, *, max_rows: int, max_blocks: int
    ) -> None:
        """Takes the memory that graphs read and write. A lane has at most ``max_rows`` decodes, a block table at most
        ``max_blocks`` blocks."""
        self._device = device
        self._model = model
        self._last = model.config.num_layers - 1
        self._scale = model.config.head_dim**-0.5
        self._row_buckets = _up_to(ROW_BUCKETS, max_rows)
        self._block_buckets = _up_to(BLOCK_BUCKETS, max_blocks) if model.ops.takes_empty_rows else ()
        widths, rows = max(self._block_buckets, default=0), self._row_buckets[-1]
        self._lanes, self._cohorts = (Frame(rows, model, dtype, widths) for _ in range(2))
        # One for both frames: what the last boundary leaves is sampled before the next one begins.
        torch_device = model.rotary_table.device
        self._logits = torch.zeros(rows, model.config.vocab_size, dtype=dtype, device=torch_device)
        self._likeliest = torch.zeros(rows, dtype=torch.int64, device=torch_device)
        self._gpu_layers: Sequence[torch.Tensor] = ()
        self._graphs: dict[GraphKey, Graph] = {}
        self.seconds, self.num_bytes = 0.0, 0

    def __len__(self) -> int:
        return len(self._graphs)

    @torch.inference_mode()
    def capture(self, gpu_layers: Sequence[torch.Tensor]) -> None:
        """Capture everything; ``gpu_layers`` is the KV cache of the GPU tier, layer by layer.

        When ``device.graph_bytes`` are taken the other buckets are left out, and their batches filled up to a larger
        one. Where capturing fails, everything is launched piece by piece. A warning tells of either.
        """
        self._gpu_layers = gpu_layers
        start_s, free_bytes = time.perf_counter(), self._device.free_bytes()
        try:
            with _no_garbage_collection():
                # The largest first: the smaller ones then find what memory they need in that of the larger. And every
                # second one before those between, so that no batch is far from its bucket if memory ends.
                downwards = self._row_buckets[::-1]
                for rows in (*downwards[::2], *downwards[1::2]):
                    self.num_bytes = free_bytes - self._device.free_bytes()
                    if self._graphs and self.num_bytes > self._device.graph_bytes:
                        self._row_buckets = tuple(sorted({key.rows for key in self._graphs}))
                        there = ", ".join(map(str, self._row_buckets))
                        taken = f"{len(self)} graphs take {self.num_bytes >> 20} MiB"
                        warnings.warn(f"batches are filled up to {there} rows: {taken}", stacklevel=2)
                        break
                    self._capture_rows(rows)
        except RuntimeError as error:
            # All or nothing: a graph that goes may take the cuBLAS workspace of the others with it.
            self._graphs.clear()
            warnings.warn(f"kernels are launched one by one, since they cannot be captured: {error}", stacklevel=2)
        self.num_bytes = free_bytes - self._device.free_bytes()
        self.seconds = time.perf_counter() - start_s

    def close(self) -> None:
        """Give all graphs back, while no other backend's are captured on the same stream."""
        self._graphs.clear()

    def boundary(self, layer: int, batches: Sequence[Rows]) -> bool:
        """Cross a boundary between two layers; False: there is no bucket for so many rows, and nothing was done."""
        boarded = self._board(batches)
        if boarded is None:
            return False
        frame, bucket, riders = boarded
        self._run(GraphKey(frame, layer, bucket, 0))
        for batch, rows in riders:
            batch.residual, batch.qkv = frame.residual[rows].clone(), frame.qkv[rows].clone()
        return True

    def last_boundary(self, batches: Sequence[Rows]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Logits ``[rows, vocab_size]`` and the most likely token of each row, int64 ``[rows]``, where every row gets a
        token; good until the next last boundary. None: it is not so, or they are too many; nothing was done."""
        if any(batch.sampling_rows is not None for batch in batches):
            return None
        boarded = self._board(batches)
        if boarded is None:
            return None
        frame, bucket, _ = boarded
        self._run(GraphKey(frame, self._last, bucket, 0))
        rows = sum(batch.num_rows for batch in batches)
        return self._logits[:rows], self._likeliest[:rows]

    def attention(self, layer: int, lane: LaneBatch) -> bool:
        """Decode attention of a lane of nothing but decodes; False: there is no graph for it, and nothing was done."""
        if lane.prefills or not self._lanes.holds(lane):
            return False
        width = _smallest(self._block_buckets, lane.decodes.block_tables.shape[1])
        if width is None:
            return False
        self._run(GraphKey(self._lanes, layer, _smallest(self._row_buckets, lane.num_rows), width))
        return True

    def whole_iteration(self, lane: LaneBatch) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Take a lane of nothing but decodes through all layers. What :meth:`last_boundary` returns, or None likewise:
        launching is then a few microseconds for a whole iteration, and the device never waits for the host."""
        if lane.prefills or lane.decodes is None or lane.sampling_rows is not None:
            return None
        rows = _smallest(self._row_buckets, lane.num_rows)
        width = _smallest(self._block_buckets, lane.decodes.block_tables.shape[1])
        graph = None if rows is None or width is None else self._graphs.get(GraphKey(self._lanes, WHOLE, rows, width))
        if graph is None:
            return None
        self._lanes.seat(lane)
        graph.replay()
        return self._logits[: lane.num_rows], self._likeliest[: lane.num_rows]

    def _board(self, batches: Sequence[Rows]) -> tuple[Frame, int, list[tuple[Rows, slice]]] | None:
        """The frame in which the batches now stand, one behind the other, the bucket of rows that holds them, and the
        rows of those that are not at home there. None: there is no such bucket."""
        lane = next((batch for batch in batches if isinstance(batch, LaneBatch)), None)
        frame = self._cohorts if lane is None else self._lanes
        bucket = _smallest(self._row_buckets, sum(batch.num_rows for batch in batches))
        if bucket is None:
            if lane is not None and frame.holds(lane):
                frame.clear()
            return None
        riders, first = [], 0
        if lane is not None:
            frame.seat(lane)
            first = lane.num_rows
        for batch in batches:
            if batch is not lane:
                rows = slice(first, first + batch.num_rows)
                frame.board(batch, rows)
                riders.append((batch, rows))
                first = rows.stop
        return frame, bucket, riders

    def _capture_rows(self, rows: int) -> None:
        boundaries = itertools.product((self._lanes, self._cohorts), range(-1, self._last + 1), (rows,), (0,))
        attentions = itertools.product((self._lanes,), range(self._last + 1), (rows,), self._block_buckets)
        wholes = itertools.product((self._lanes,), (WHOLE,), (rows,), self._block_buckets)
        for key in itertools.starmap(GraphKey, itertools.chain(boundaries, attentions, wholes)):
            if -1 <= key.layer <= 0 or key.layer == self._last:
                # What is launched for the first time is compiled and loaded, which a capture does not allow. Frames
                # hold contexts of no tokens, so this does nothing.
                self._launch(key)
            self._graphs[key] = self._device.capture(lambda key=key: self._launch(key))

    def _run(self, key: GraphKey) -> None:
        graph = self._graphs.get(key)
        if graph is None:
            self._launch(key)
        else:
            graph.replay()

    def _launch(self, key: GraphKey) -> None:
        """The work of a graph, piece by piece."""
        frame, layer, rows, blocks = key
        if layer == WHOLE:
            for number in range(-1, self._last):
                self._launch(GraphKey(frame, number, rows, 0))
                self._launch(GraphKey(frame, number + 1, rows, blocks))
            self._launch(GraphKey(frame, self._last, rows, 0))
            return
        if blocks:
            new = self._model.split_qkv(frame.qkv[:rows])
            tables, lens = frame.block_tables[:rows, :blocks], frame.seq_lens[:rows]
            out = frame.attention_out[:rows]
            self._model.ops.decode_attention(*new, self._gpu_layers[layer], tables, lens, out, self._scale)
            return
        attention_out, residual = frame.attention_out[:rows], frame.residual[:rows]
        if layer == self._last:
            self._logits[:rows].copy_(self._model.leave(attention_out, residual))
            self._likeliest[:rows].copy_(most_likely(self._logits[:rows]))
            return
        rotary_rows, qkv = frame.rotary_rows[:rows], frame.qkv[:rows]
        if layer < 0:
            residual.copy_(self._model.embed(frame.token_ids[:rows]))
            self._model.enter(residual, rotary_rows, out=qkv)
        else:
            self._model.cross(layer, attention_out, residual, rotary_rows, out=qkv)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Graphs that are garbage must not be destroyed in the middle of a capture: that would end it."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _up_to(buckets: Sequence[int], most: int) -> tuple[int, ...]:
    """The buckets that are needed where the largest size is ``most``."""
    return tuple(bucket for i, bucket in enumerate(buckets) if i == 0 or buckets[i - 1] < most)


def _smallest(buckets: Sequence[int], size: int) -> int | None:
    place = bisect_left(buckets, size)
    return buckets[place] if place < len(buckets) else None
