"""Predicted seconds of operations for many sizes at once: the tables of the performance model over numpy arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from apex.perf.model import Curve, PerfModel, Surface

Floats = NDArray[np.float64]


class _CurveArray:
    """:class:`~apex.perf.model.Curve` over arrays."""

    def __init__(self, curve: Curve) -> None:
        self._sizes = np.array(curve.sizes, float)
        self._seconds = np.array(curve.seconds, float)
        self._slopes = np.diff(self._seconds) / np.diff(self._sizes)
        self._inner = self._sizes[1:-1]

    def __call__(self, sizes: Floats) -> Floats:
        i = self._inner.searchsorted(sizes, "right")  # beyond the ends: the line through the two sizes there
        return np.maximum(self._seconds[i] + self._slopes[i] * (sizes - self._sizes[i]), 0.0)


class _SurfaceArray:
    """:class:`~apex.perf.model.Surface` over arrays of both sizes, which must broadcast."""

    def __init__(self, surface: Surface) -> None:
        sizes = sorted({size for curve in surface.curves for size in curve.sizes})
        self._firsts, self._sizes = np.array(surface.firsts, float), np.array(sizes, float)
        self._seconds = np.array([[curve(size) for size in sizes] for curve in surface.curves])
        self._slopes = np.diff(self._seconds, axis=1) / np.diff(self._sizes)
        self._inner_firsts, self._inner = self._firsts[1:-1], self._sizes[1:-1]

    def __call__(self, firsts: Floats, seconds: Floats) -> Floats:
        i = self._inner_firsts.searchsorted(firsts, "right")
        j = self._inner.searchsorted(seconds, "right")
        beyond = seconds - self._sizes[j]
        low, high = (np.maximum(self._seconds[k, j] + self._slopes[k, j] * beyond, 0.0) for k in (i, i + 1))
        share = (firsts - self._firsts[i]) / (self._firsts[i + 1] - self._firsts[i])
        return np.maximum(low + share * (high - low), 0.0)


class OperationTimes:
    """What :class:`~apex.perf.model.PerfModel` predicts, for arrays of sizes. Sizes need not be whole.

    Where a size is 0 there is nothing to do, and the time is 0.
    """

    def __init__(self, model: PerfModel) -> None:
        table = model.table
        self.num_layers = model.num_layers
        self.stream_s, self.streamed_layers = table.stream_s, table.streamed_layers
        self._linear = _CurveArray(table.linear)
        self._ends = _CurveArray(table.ends)
        self._host = _CurveArray(table.iteration)
        self._hand_over = _CurveArray(table.hand_over)
        self._gpu_attention = _SurfaceArray(table.gpu_attention)
        self._cpu_attention = _SurfaceArray(table.cpu_attention)

    def linear_s(self, tokens: ArrayLike) -> Floats:
        """Seconds of one stage (T_l) of a batch of ``tokens``."""
        return _where_any(np.asarray(tokens, float), self._linear)

    def layer_s(self, busy_s: ArrayLike) -> Floats:
        """A layer in which the GPU batch is busy for so long, and no shorter than the weights need to arrive."""
        return np.maximum(busy_s, self.stream_s)

    def gpu_attention_s(self, requests: ArrayLike, context: ArrayLike) -> Floats:
        """Seconds of one layer's decode attention in the GPU batch (T_g); ``context`` tokens are a request's mean."""
        context = np.asarray(context, float)
        return _where_any(np.asarray(requests, float), lambda n: self._gpu_attention(n, context))

    def cpu_attention_s(self, requests: ArrayLike, context: ArrayLike) -> Floats:
        """Seconds of one layer's decode attention on the CPU worker (T_c); ``context`` tokens are a request's mean."""
        context = np.asarray(context, float)
        return _where_any(np.asarray(requests, float), lambda n: self._cpu_attention(n, context))

    def outside_layers_s(self, rows: ArrayLike) -> Floats:
        """Seconds of an iteration beside its layers, for ``rows`` that get a token."""
        return _where_any(np.asarray(rows, float), lambda n: self._host(n) + self._ends(n))

    def alone_stage_s(self, requests: ArrayLike) -> Floats:
        """Seconds of the GPU batch for one stage of a CPU batch on its own, and for submitting its next attention
        task."""
        return _where_any(np.asarray(requests, float), lambda n: self._linear(n) + self._hand_over(n))

    def hand_over_s(self, requests: ArrayLike) -> Floats:
        """Seconds of the GPU batch for submitting an attention task of a CPU batch of ``requests``."""
        return _where_any(np.asarray(requests, float), self._hand_over)


def _where_any(sizes: Floats, predict) -> Floats:
    return np.where(sizes > 0, predict(sizes), 0.0)
