"""Stages and decode attention as captured graphs: one launch each instead of a dozen.

A graph computes on the memory and the number of rows it was captured with. So graphs are captured for some numbers of
rows, the buckets, and a batch takes the smallest bucket that holds it. The rows behind the batch are padding: no
operation mixes rows, empty contexts store nothing, and rows of slot -1 have no state of linear attention. All buckets
share one set of buffers, a frame.

All graphs are captured before anything is served. Failures show at the start, no request waits for a capture, no copy
of the attention worker runs beside one, and the memory they take is known.

A GPU batch stays in the frame while it crosses layers, so nothing is copied between its graphs. The rows of CPU batches
are copied behind the GPU batch's before a stage, and out again after it. CPU batches that run a stage without a GPU
batch use a second frame, so the GPU batch need not move.
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

from swiftllm.device import Device, Graph
from swiftllm.kv.block_pool import LayerGroups
from swiftllm.model.llama import LlamaModel
from swiftllm.model.placement import Placement
from swiftllm.ops.interface import StateRows
from swiftllm.runtime.model_input import GpuBatchTensors, Rows
from swiftllm.sampling.sampler import most_likely

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)  # with more rows launching is a small part of the work
BLOCK_BUCKETS = (16, 64, 256, 1024)  # widths of block tables; a program beyond a context does nothing, yet is launched


class Frame:
    """What graphs read and write, for up to ``rows`` rows."""

    def __init__(self, rows: int, model: LlamaModel, dtype: torch.dtype, groups: int, max_blocks: int) -> None:
        config, device = model.config, model.rotary_table.device

        def buffer(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=device)

        self.token_ids = buffer(dtype=torch.int64)
        self.rotary_rows = buffer(2, config.head_dim, dtype=torch.float32)
        self.residual = buffer(config.hidden_size, dtype=model.residual_dtype)
        self.qkv = buffer(config.num_projected_heads, config.head_dim)
        self.attention_out = buffer(config.num_heads, config.head_dim)
        self.block_tables = torch.zeros(groups, rows, max_blocks, dtype=torch.int32, device=device)
        self.seq_lens = buffer(dtype=torch.int32)
        self.state_slots = None if model.states is None else buffer(dtype=torch.int64)
        self._has_gates = config.num_gates > 0
        # Weak, as the frame outlives its GPU batches: one that has ended needs no memory of its own.
        self._gpu_batch: Callable[[], GpuBatchTensors | None] = lambda: None

    def holds(self, gpu_batch: GpuBatchTensors) -> bool:
        return self._gpu_batch() is gpu_batch

    def move_in(self, gpu_batch: GpuBatchTensors) -> None:
        """Make the frame's first rows the GPU batch's tensors."""
        if self.holds(gpu_batch):
            return
        self.move_out()
        rows = gpu_batch.num_rows
        for name in ("token_ids", "rotary_rows", "residual", "qkv", "attention_out"):
            own, place = getattr(gpu_batch, name), getattr(self, name)[:rows]
            if own is not None:
                place.copy_(own)
            setattr(gpu_batch, name, place)
        if gpu_batch.decodes is not None and not gpu_batch.prefills:
            # Padding has no context, so it reads and stores nothing, whatever blocks an earlier batch has left there.
            tables = gpu_batch.decodes.block_tables[:, :, : self.block_tables.shape[2]]
            self.block_tables[:, :rows, : tables.shape[2]].copy_(tables)
            self.seq_lens.zero_()
            self.seq_lens[:rows].copy_(gpu_batch.decodes.seq_lens)
        if self.state_slots is not None and gpu_batch.state_rows is not None:
            self.state_slots[:rows].copy_(gpu_batch.state_rows.decode_slots)
        self._gpu_batch = weakref.ref(gpu_batch)

    def move_out(self) -> None:
        """Give the GPU batch, if it is still in use, memory of its own."""
        gpu_batch = self._gpu_batch()
        if gpu_batch is not None:
            for name in ("token_ids", "rotary_rows", "residual", "qkv", "attention_out"):
                setattr(gpu_batch, name, getattr(gpu_batch, name).clone())
        self._gpu_batch = lambda: None

    def inputs(self, batch: Rows, rows: slice) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Where the inputs of a batch's next stage go, and what they are."""
        # Before its first stage a batch has no residual, and its stage reads token ids.
        names = ("rotary_rows", "token_ids") if batch.residual is None else ("rotary_rows", "residual", "attention_out")
        if self._has_gates and batch.qkv is not None:
            names = (*names, "qkv")  # with the gates of its attention
        pairs = [(getattr(self, name)[rows], getattr(batch, name)) for name in names]
        if self.state_slots is not None and batch.state_rows is not None:
            pairs.append((self.state_slots[rows], batch.state_rows.decode_slots))
        return pairs

    def end_at(self, num_rows: int) -> None:
        """Rows from that one on are padding, and have no state."""
        if self.state_slots is not None:
            self.state_slots[num_rows:].fill_(-1)

    def state_rows(self, rows: int) -> StateRows | None:
        """Of the first ``rows``."""
        return None if self.state_slots is None else StateRows((), self.state_slots[:rows], has_padding=True)

    def outputs(self, batch: Rows, rows: slice) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """New memory of a batch for the outputs of its stage, and where these are."""
        batch.residual, batch.qkv = (torch.empty_like(place[rows]) for place in (self.residual, self.qkv))
        return [(batch.residual, self.residual[rows]), (batch.qkv, self.qkv[rows])]


WHOLE = -2  # instead of a layer: all layers, for a GPU batch alone


class GraphKey(NamedTuple):
    """``blocks``: width of the block tables for decode attention; 0: the stage after ``layer``."""

    frame: Frame
    layer: int
    rows: int
    blocks: int


class CapturedBucket(NamedTuple):
    """What the graphs for a number of rows took: with their kernels' first launches, and of device memory."""

    rows: int
    graphs: int
    seconds: float
    num_bytes: int


class LayerGraphs:
    """Graphs of the stages, of decode attention, and of whole iterations of a GPU batch that no CPU batch joins.

    Attributes: ``seconds`` that capturing took, ``num_bytes`` of device memory that the graphs take, and of both each
    bucket's part, in the order of capturing (``captured``).
    """

    def __init__(
        self,
        device: Device,
        model: LlamaModel,
        dtype: torch.dtype,
        *,
        max_rows: int,
        max_blocks: int,
        layer_groups: LayerGroups,
        placement: Placement,
        all_agree: Callable[[bool], bool] | None = None,
    ) -> None:
        """Allocates the memory that graphs read and write. A GPU batch has at most ``max_rows`` decodes, a block table
        at most ``max_blocks`` blocks. Stages for which the CPU computes are not captured, nor are whole iterations
        unless all weights are resident. ``all_agree``: whether all of several ranks say so. They must capture the same
        graphs, since these hold their collectives."""
        self._placement = placement
        self._all_agree = all_agree or (lambda is_well: is_well)
        self._device = device
        self._model = model
        self._layer_groups = layer_groups
        self._last = model.config.num_layers - 1
        self._scale = model.config.head_dim**-0.5
        self._row_buckets = _up_to(ROW_BUCKETS, max_rows)
        self._block_buckets = _up_to(BLOCK_BUCKETS, max_blocks) if model.ops.takes_empty_rows else ()
        widths, rows = max(self._block_buckets, default=0), self._row_buckets[-1]
        self._gpu_batches, self._cpu_batches = (
            Frame(rows, model, dtype, len(layer_groups.windows), widths) for _ in range(2)
        )
        # One for both frames: the logits are sampled before the next stage begins.
        torch_device = model.rotary_table.device
        self._logits = torch.zeros(rows, model.num_logits, dtype=dtype, device=torch_device)
        self._num_rows = torch.zeros(1, dtype=torch.int32, device=torch_device)
        self._likeliest = torch.zeros(rows, dtype=torch.int64, device=torch_device)
        self._gpu_layers: Sequence[torch.Tensor] = ()
        self._graphs: dict[GraphKey, Graph] = {}
        self.seconds, self.num_bytes = 0.0, 0
        self.captured: list[CapturedBucket] = []

    def __len__(self) -> int:
        return len(self._graphs)

    @torch.inference_mode()
    def capture(self, gpu_layers: Sequence[torch.Tensor]) -> None:
        """Capture everything; ``gpu_layers`` is the KV cache of the GPU tier, layer by layer.

        Capturing stops once the graphs take ``device.graph_bytes``: batches then use the next larger bucket there is.
        If capturing fails, there are no graphs, and kernels are launched one by one. Both cases give a warning.
        """
        self._gpu_layers = gpu_layers
        start_s, free_bytes = time.perf_counter(), self._device.free_bytes()
        self.num_bytes, self.captured = 0, []
        for frame in (self._gpu_batches, self._cpu_batches):
            frame.end_at(0)
        try:
            with _no_garbage_collection():
                self._launch_all()
                # The largest first: the smaller ones reuse its memory. Every second one before those between, so that
                # no batch is far from its bucket if memory runs out.
                downwards = self._row_buckets[::-1]
                for rows in (*downwards[::2], *downwards[1::2]):
                    if self._graphs and not self._all_agree(self.num_bytes <= self._device.graph_bytes):
                        self._row_buckets = tuple(sorted({key.rows for key in self._graphs}))
                        there = ", ".join(map(str, self._row_buckets))
                        taken = f"{len(self)} graphs take {self.num_bytes >> 20} MiB"
                        warnings.warn(f"batches are filled up to {there} rows: {taken}", stacklevel=2)
                        break
                    there, before, began_s = len(self), self.num_bytes, time.perf_counter()
                    self._capture_rows(rows)
                    self.num_bytes = free_bytes - self._device.free_bytes()
                    took = time.perf_counter() - began_s, self.num_bytes - before
                    self.captured.append(CapturedBucket(rows, len(self) - there, *took))
        except RuntimeError as error:
            # All or nothing: a destroyed graph may take the cuBLAS workspace of the others with it.
            self._graphs.clear()
            self.captured.clear()
            warnings.warn(f"kernels are launched one by one, since they cannot be captured: {error}", stacklevel=2)
        self.num_bytes = free_bytes - self._device.free_bytes()
        self.seconds = time.perf_counter() - start_s

    def close(self) -> None:
        """Destroy all graphs, before another backend captures its own on the same stream."""
        self._graphs.clear()

    def run_stage(self, layer: int, batches: Sequence[Rows]) -> bool:
        """Cross a stage before the last; False: no graph takes these rows, and nothing was done."""
        placed = self._place(batches)
        if placed is None:
            return False
        frame, bucket, cpu_batches = placed
        self._run(GraphKey(frame, layer, bucket, 0), sum(batch.num_rows for batch in batches))
        # Out at once: the next stage, whoever runs it, overwrites the frame, and CPU attention still reads these.
        _copy([pair for placed_batch in cpu_batches for pair in frame.outputs(*placed_batch)])
        return True

    def last_stage(self, batches: Sequence[Rows]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Logits ``[rows, num_logits]`` and the most likely token of each row, int64 ``[rows]``; valid until the next
        last stage. None: some row gets no token, or no graph takes the rows; nothing was done."""
        if any(batch.sampling_rows is not None for batch in batches):
            return None
        placed = self._place(batches)
        if placed is None:
            return None
        frame, bucket, _ = placed
        rows = sum(batch.num_rows for batch in batches)
        self._run(GraphKey(frame, self._last, bucket, 0), rows)
        return self._logits[:rows], self._likeliest[:rows]

    def attention(self, layer: int, gpu_batch: GpuBatchTensors) -> bool:
        """Attention of a GPU batch of decodes only; False: there is no graph for it, and nothing was done."""
        if gpu_batch.prefills or gpu_batch.decodes is None or not self._gpu_batches.holds(gpu_batch):
            return False
        width = _smallest(self._block_buckets, gpu_batch.decodes.block_tables.shape[2])
        if width is None:
            return False
        rows = _smallest(self._row_buckets, gpu_batch.num_rows)
        assert rows is not None  # the GPU batch's buffers hold it
        self._run(GraphKey(self._gpu_batches, layer, rows, width), gpu_batch.num_rows)
        return True

    def run_full_graph(self, gpu_batch: GpuBatchTensors) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Take a GPU batch of decodes only through all layers with one launch of a few microseconds. Returns what
        :meth:`last_stage` returns; None: there is no graph for it, and nothing was done."""
        if gpu_batch.prefills or gpu_batch.decodes is None or gpu_batch.sampling_rows is not None:
            return None
        rows = _smallest(self._row_buckets, gpu_batch.num_rows)
        width = _smallest(self._block_buckets, gpu_batch.decodes.block_tables.shape[2])
        graph = (
            None if rows is None or width is None else self._graphs.get(GraphKey(self._gpu_batches, WHOLE, rows, width))
        )
        if graph is None:
            return None
        self._gpu_batches.move_in(gpu_batch)
        self._tell_rows(self._gpu_batches, gpu_batch.num_rows)
        graph.replay()
        return self._logits[: gpu_batch.num_rows], self._likeliest[: gpu_batch.num_rows]

    def _place(self, batches: Sequence[Rows]) -> tuple[Frame, int, list[tuple[Rows, slice]]] | None:
        """Bring the batches into a frame, one behind the other. Returns the frame, the bucket that holds them, and the
        rows of the CPU batches, which must be copied out again. None: no bucket holds them, or there are chunks of
        prompts that continue states, which no graph does."""
        gpu_batch = next((batch for batch in batches if isinstance(batch, GpuBatchTensors)), None)
        frame = self._cpu_batches if gpu_batch is None else self._gpu_batches
        bucket = _smallest(self._row_buckets, sum(batch.num_rows for batch in batches))
        has_chunks = gpu_batch is not None and gpu_batch.state_rows is not None and gpu_batch.state_rows.chunks
        if bucket is None or has_chunks:
            # This stage runs without a graph, and gives the GPU batch new tensors: the frame is no longer its own.
            if gpu_batch is not None and frame.holds(gpu_batch):
                frame.move_out()
            return None
        cpu_batches, first = [], 0
        if gpu_batch is not None:
            frame.move_in(gpu_batch)
            first = gpu_batch.num_rows
        for batch in batches:
            if batch is not gpu_batch:
                rows = slice(first, first + batch.num_rows)
                cpu_batches.append((batch, rows))
                first = rows.stop
        _copy([pair for placed_batch in cpu_batches for pair in frame.inputs(*placed_batch)])
        self._tell_rows(frame, sum(batch.num_rows for batch in batches))
        return frame, bucket, cpu_batches

    def _tell_rows(self, frame: Frame, num_rows: int) -> None:
        """Rows of the next launch that are no padding. Padding is computed, but for experts: it would read theirs."""
        frame.end_at(num_rows)
        if self._model.config.experts is not None:
            self._num_rows.fill_(num_rows)

    def _launch_all(self) -> None:
        """Launch all that is to be captured, kernel by kernel. A kernel's first launch compiles and loads it, which a
        capture does not allow, and layers need not have the same kernels: some may be quantised and others not.

        Layer by layer, so that weights that are copied to the GPU for each use come once. Ranks launch the same
        collectives, as all is launched before a capture can fail. Contexts in the frame are empty, so nothing is
        stored, and no row has a state. The other frame has the same kernels.
        """
        for layer in range(-1, self._last + 1):
            widths = self._block_buckets if layer >= 0 else ()
            if not self._placement.waits_for_cpu(layer):
                self._model.weights.enter(layer)
                widths = (0, *widths)
            for rows, blocks in itertools.product(self._row_buckets[::-1], widths):
                self._launch(GraphKey(self._gpu_batches, layer, rows, blocks))

    def _capture_rows(self, rows: int) -> None:
        stages = itertools.product((self._gpu_batches, self._cpu_batches), range(-1, self._last + 1), (rows,), (0,))
        attentions = itertools.product((self._gpu_batches,), range(self._last + 1), (rows,), self._block_buckets)
        wholes = itertools.product((self._gpu_batches,), (WHOLE,), (rows,), self._block_buckets)
        if not self._placement.is_all_resident:
            wholes = ()
        keys = list(itertools.starmap(GraphKey, itertools.chain(stages, attentions, wholes)))
        # What the CPU computes waits for it, which no capture can.
        keys = [key for key in keys if key.blocks or not self._placement.waits_for_cpu(key.layer)]
        error = None
        try:
            for key in keys:
                self._graphs[key] = self._device.capture(lambda key=key: self._launch(key))
        except RuntimeError as failure:
            error = failure
        # Every rank asks here, failed or not: one that left early would leave the others waiting for its answer.
        if not self._all_agree(error is None):
            raise error or RuntimeError("another rank failed to capture")

    def _run(self, key: GraphKey, num_rows: int) -> None:
        """Without a graph, as where the CPU computes, only the ``num_rows`` that are there."""
        graph = self._graphs.get(key)
        if graph is None:
            self._launch(key._replace(rows=num_rows))
        else:
            graph.replay()

    def _launch(self, key: GraphKey) -> None:
        """The work of a graph, launched kernel by kernel."""
        frame, layer, rows, blocks = key
        if layer == WHOLE:
            for number in range(-1, self._last):
                self._launch(GraphKey(frame, number, rows, 0))
                self._launch(GraphKey(frame, number + 1, rows, blocks))
            self._launch(GraphKey(frame, self._last, rows, 0))
            return
        if blocks:
            new = self._model.split_qkv(frame.qkv[:rows])
            group = self._layer_groups.group_of[layer]
            tables, lens = frame.block_tables[group, :rows, :blocks], frame.seq_lens[:rows]
            addressed = self._gpu_layers[layer], tables, lens, frame.attention_out[:rows]
            window = self._layer_groups.windows[group]
            self._model.ops.decode_attention(*new, *addressed, self._scale, window, self._model.sinks(layer))
            return
        qkv, residual, rotary_rows = frame.qkv[:rows], frame.residual[:rows], frame.rotary_rows[:rows]
        state_rows = frame.state_rows(rows)
        if layer < 0:
            residual.copy_(self._model.embed(frame.token_ids[:rows]))
            self._model.first_stage(residual, rotary_rows, qkv, self._num_rows, state_rows)
            return
        attention_out = self._model.gated(frame.attention_out[:rows], qkv)
        if layer == self._last:
            self._logits[:rows].copy_(self._model.last_stage(attention_out, residual, self._num_rows))
            self._likeliest[:rows].copy_(most_likely(self._logits[:rows]))
            return
        self._model.stage(layer, attention_out, residual, rotary_rows, qkv, self._num_rows, state_rows)


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy contiguous sources to their targets, all with one launch: torch fuses copies of one dtype."""
    if pairs:
        targets, sources = ([tensor.view(torch.int32) for tensor in side] for side in zip(*pairs, strict=True))
        torch._foreach_copy_(targets, sources)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Destroying a garbage graph in the middle of a capture would end the capture."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _up_to(buckets: Sequence[int], most: int) -> tuple[int, ...]:
    """The buckets needed for sizes up to ``most``."""
    return tuple(bucket for i, bucket in enumerate(buckets) if i == 0 or buckets[i - 1] < most)


def _smallest(buckets: Sequence[int], size: int) -> int | None:
    place = bisect_left(buckets, size)
    return buckets[place] if place < len(buckets) else None
