"""The hardware interface of an executor. GPU batches and CPU batches are opaque to it; only a backend knows their
contents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from swiftllm.core.plan import GpuBatchItem, StateCopy, Swap
from swiftllm.core.request import Request, TokenLogprob


class WorkerDied(RuntimeError):
    """The CPU worker died before an attention task was done. :meth:`Backend.recover` restarts it."""


class RankFailed(RuntimeError):
    """Another process of a tensor-parallel engine has died, or could not carry out a call; the message says which.
    :meth:`Backend.recover` replaces it or resets it."""


class HostDied(RuntimeError):
    """Another host that held a part of the CPU tier is gone, and its K and V with it.

    Attributes:
        swaps_incomplete: whether it died before the swaps of the plan being run were known to be done. Blocks that
            they fill, of whatever tier, may then hold anything.
    """

    def __init__(self, message: str, *, swaps_incomplete: bool = False) -> None:
        super().__init__(message)
        self.swaps_incomplete = swaps_incomplete


@dataclass(frozen=True)
class AttentionTimes:
    """Times of one CPU attention task, in seconds of the backend's clock.

    The worker computes from ``start_s`` to ``done_s``. The result is usable from ``ready_s``. ``to_host`` and
    ``to_gpu`` are the start and end of its transfers, where the backend records them separately.
    """

    start_s: float
    done_s: float
    ready_s: float
    to_host: tuple[float, float] | None = None
    to_gpu: tuple[float, float] | None = None


@dataclass(frozen=True)
class SwapTimes:
    """Start and end of an iteration's swaps, in seconds of the backend's clock. Layers are copied one by one."""

    start_s: float
    end_s: float
    num_layers: int

    def ready_s(self, layer: int) -> float:
        """When the blocks of a layer are copied."""
        return self.start_s + (layer + 1) / self.num_layers * (self.end_s - self.start_s)


class AttentionFuture(Protocol):
    """One CPU attention task under way. It is *ready* once a stage that is launched reads its result."""

    def ready(self) -> bool:
        """Whether :meth:`wait` would return at once; never blocks."""
        ...

    def wait(self) -> float:
        """Block until the result is available. Returns the seconds that the CPU worker computed.

        Raises what the CPU worker raised.
        """
        ...

    def times(self) -> AttentionTimes:
        """Times of the task, for timelines. Call only once the result is available."""
        ...


class Batch(Protocol):
    """A GPU batch or a CPU batch: rows of activations, one per token, that run stages together."""

    @property
    def num_rows(self) -> int: ...


GpuBatchT = TypeVar("GpuBatchT", bound=Batch)
CpuBatchT = TypeVar("CpuBatchT", bound=Batch)


class ExecutorBackend(Protocol[GpuBatchT, CpuBatchT]):
    """What an executor asks for.

    Layers are numbered 0..num_layers-1. Stage ``i`` is the linear work between attention i and attention i+1.
    Stage -1 is the embedding and the first QKV. Stage num_layers-1 ends in logits and sampled tokens.
    """

    @property
    def num_layers(self) -> int: ...

    def now(self) -> float:
        """Seconds of the backend's clock: real time, or virtual time in a simulation."""
        ...

    def swap(self, swaps: Sequence[Swap]) -> SwapTimes | None:
        """Begin to copy blocks between the tiers; what is asked of this backend afterwards finds them copied, and may
        reuse the source blocks. A GPU batch's attention waits for the part of its layer. Returns the times of the
        copies where they are known beforehand."""
        ...

    def copy_states(self, copies: Sequence[StateCopy]) -> None:
        """Begin to copy states between the device and host memory, in order; what is asked of this backend afterwards
        finds them copied. Called right after :meth:`swap`, in models with linear attention alone."""
        ...

    def open_gpu_batch(self, items: Sequence[GpuBatchItem]) -> GpuBatchT: ...

    def open_cpu_batch(self, requests: Sequence[Request]) -> CpuBatchT:
        """A CPU batch before stage -1, which is to compute the last known token of each request."""
        ...

    def drop_rows(self, cpu_batch: CpuBatchT, request_ids: frozenset[str]) -> CpuBatchT:
        """The CPU batch without these requests. Call only while the CPU batch has no outstanding attention task."""
        ...

    def run_stage(self, layer: int, batches: Sequence[GpuBatchT | CpuBatchT]) -> Mapping[str, int]:
        """Compute stage ``layer`` for all batches, with concatenated GEMMs, so that weights are read once.

        The last stage returns the sampled tokens by request id; all others return nothing. The last stage also
        appends to ``Request.prompt_logprobs`` for the chunks of requests that ask for them.
        """
        ...

    def gpu_attention(self, layer: int, gpu_batch: GpuBatchT) -> None:
        """Attention of one layer for the GPU batch, prefills and decodes. Stores the new K and V in each item's
        tier."""

    def run_full_graph(self, gpu_batch: GpuBatchT) -> Mapping[str, int] | None:
        """Compute all stages and attentions of an iteration without CPU batches. Returns the sampled tokens.

        None: not possible for this GPU batch, and nothing was computed. The executor then goes layer by layer.
        """
        ...

    def submit_cpu_attention(self, layer: int, cpu_batch: CpuBatchT) -> AttentionFuture:
        """Submit one layer's decode attention of a CPU batch, including its K/V store, to the CPU worker."""
        ...


class Backend(ExecutorBackend[GpuBatchT, CpuBatchT], Protocol[GpuBatchT, CpuBatchT]):
    """The same, and what an engine asks for."""

    @property
    def worker_restarts(self) -> int:
        """How often the CPU worker was restarted."""
        ...

    def holds_weights(self, layer: int) -> bool:
        """Whether stage ``layer`` can be run now without a copy of its weights for that alone."""
        ...

    def take_logprobs(self) -> Mapping[str, TokenLogprob]:
        """Log-probabilities of the tokens sampled since the last call, by id of the requests that ask for them."""
        ...

    def recover(self) -> None:
        """Reset after an iteration that raised. Afterwards no work is under way and no K and V are valid.

        Raises:
            DeviceHung: the GPU does not end the work under way.
        """

    def close(self) -> None: ...
