"""Boundaries and decode attention as captured graphs: one launch each instead of a dozen.

A graph computes on the memory it was captured on, and as many rows as it was captured with. So there are graphs for
some numbers of rows, buckets, and a batch takes the smallest that holds it; the rows behind it hold what was there
before, which is row by row worth nothing and harms nobody, since no operation mixes rows and empty contexts store
nothing. All buckets share one set of buffers, a frame.

A lane lives in the frame while it crosses layers, so that nothing is copied between its graphs. Cohorts come and go:
their rows are copied behind the lane's when they board, and back out after. Cohorts that cross without a lane have a
frame of their own, so that the lane stays where it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from swiftllm.device import Device, Graph
from swiftllm.model.llama import LlamaModel
from swiftllm.torch_batch import Lane, Rows

ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # beyond, launching is a small part of the work
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
        self._lane: Callable[[], Lane | None] = lambda: None

    def holds(self, lane: Lane) -> bool:
        return self._lane() is lane

    def seat(self, lane: Lane) -> None:
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


class LayerGraphs:
    """Graphs are captured when a bucket is first used, after its work has been launched piece by piece."""

    def __init__(
        self,
        device: Device,
        model: LlamaModel,
        gpu_layers: Sequence[torch.Tensor],
        dtype: torch.dtype,
        *,
        max_rows: int,
        max_blocks: int,
    ) -> None:
        """``gpu_layers``: KV cache of the GPU tier, layer by layer. A lane has at most ``max_rows`` decodes, a block
        table at most ``max_blocks`` blocks."""
        self._device = device
        self._model = model
        self._gpu_layers = gpu_layers
        self._scale = model.config.head_dim**-0.5
        self._row_buckets = _up_to(ROW_BUCKETS, max_rows)
        self._block_buckets = _up_to(BLOCK_BUCKETS, max_blocks) if model.ops.takes_empty_rows else ()
        widths = max(self._block_buckets, default=0)
        self._lanes, self._cohorts = (Frame(self._row_buckets[-1], model, dtype, widths) for _ in range(2))
        self._graphs: dict[tuple[Callable[..., None], Frame, int, int, int], Graph] = {}

    def boundary(self, layer: int, batches: Sequence[Rows]) -> bool:
        """Cross a boundary between two layers; False: there is no bucket for so many rows, and nothing was done."""
        lane = next((batch for batch in batches if isinstance(batch, Lane)), None)
        frame = self._cohorts if lane is None else self._lanes
        bucket = _smallest(self._row_buckets, sum(batch.num_rows for batch in batches))
        if bucket is None:
            if lane is not None and frame.holds(lane):
                frame.clear()
            return False
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
        self._run(self._cross, frame, layer, bucket, 0)
        for batch, rows in riders:
            batch.residual, batch.qkv = frame.residual[rows].clone(), frame.qkv[rows].clone()
        return True

    def attention(self, layer: int, lane: Lane) -> bool:
        """Decode attention of a lane of nothing but decodes; False: there is no graph for it, and nothing was done."""
        if lane.prefills or not self._lanes.holds(lane):
            return False
        width = _smallest(self._block_buckets, lane.decodes.block_tables.shape[1])
        if width is None:
            return False
        self._run(self._attend, self._lanes, layer, _smallest(self._row_buckets, lane.num_rows), width)
        return True

    def _run(self, work: Callable[..., None], frame: Frame, layer: int, rows: int, width: int) -> None:
        key = work, frame, layer, rows, width
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        # What is launched for the first time is compiled and loaded, which a capture does not allow.
        work(frame, layer, rows, width)
        self._graphs[key] = self._device.capture(lambda: work(frame, layer, rows, width))

    def _cross(self, frame: Frame, layer: int, rows: int, width: int) -> None:
        if layer < 0:
            hidden = self._model.embed(frame.token_ids[:rows])
        else:
            hidden = self._model.post_attention(layer, frame.attention_out[:rows], frame.residual[:rows])
        frame.residual[:rows].copy_(hidden)
        frame.qkv[:rows].copy_(self._model.pre_attention(layer + 1, hidden, frame.rotary_rows[:rows]))

    def _attend(self, frame: Frame, layer: int, rows: int, width: int) -> None:
        new = self._model.split_qkv(frame.qkv[:rows])
        tables, lens = frame.block_tables[:rows, :width], frame.seq_lens[:rows]
        self._model.ops.decode_attention(
            *new, self._gpu_layers[layer], tables, lens, frame.attention_out[:rows], self._scale
        )


def _up_to(buckets: Sequence[int], most: int) -> tuple[int, ...]:
    """The buckets that are needed where the largest size is ``most``."""
    return tuple(bucket for i, bucket in enumerate(buckets) if i == 0 or buckets[i - 1] < most)


def _smallest(buckets: Sequence[int], size: int) -> int | None:
    return next((bucket for bucket in buckets if bucket >= size), None)
