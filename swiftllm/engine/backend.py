"""What an executor may ask of hardware. It moves opaque lanes and cohorts; only a backend knows what they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from swiftllm.core.plan import LaneItem, Swap
from swiftllm.core.request import Request, TokenLogprob


class WorkerDied(RuntimeError):
    """The CPU worker ended before a ticket's work was done. :meth:`Backend.recover` starts it again."""


@dataclass(frozen=True)
class TicketTimes:
    """When a CPU attention task went through its stations, in seconds of the backend's clock.

    The worker computes from ``start_s`` to ``done_s``; at ``ready_s`` the result may be used. ``to_host`` and
    ``to_gpu`` are the start and end of its transfers, where the backend books them by themselves.
    """

    start_s: float
    done_s: float
    ready_s: float
    to_host: tuple[float, float] | None = None
    to_gpu: tuple[float, float] | None = None


class Ticket(Protocol):
    """One CPU attention task under way."""

    def ready(self) -> bool:
        """Whether the result is there; never blocks."""

    def wait(self) -> float:
        """Block until the result is there and return the seconds the CPU worker computed for it.

        Raises whatever the CPU worker raised.
        """

    def times(self) -> TicketTimes:
        """When the task ran, for timelines. Call only once the result is there."""


class Batch(Protocol):
    """A lane or a cohort: rows of activations (one per token) that cross boundaries together."""

    @property
    def num_rows(self) -> int: ...


class Backend(Protocol):
    """Layers are numbered 0..num_layers-1. Boundary ``i`` is the linear work between attention i and attention i+1;
    boundary -1 is the embedding and the first QKV; boundary num_layers-1 ends in logits and sampled tokens."""

    @property
    def num_layers(self) -> int: ...

    @property
    def worker_restarts(self) -> int:
        """How often the CPU worker had to be started again."""

    def now(self) -> float:
        """Seconds of the backend's clock: real time, or virtual time in a simulation."""

    def swap(self, swaps: Sequence[Swap]) -> None:
        """Copy blocks between the tiers. The source blocks may be reused once this returns."""

    def open_lane(self, items: Sequence[LaneItem]) -> Batch: ...

    def open_cohort(self, requests: Sequence[Request]) -> Batch:
        """A cohort about to compute the last known token of each request, standing before boundary -1."""

    def drop_rows(self, cohort: Batch, request_ids: frozenset[str]) -> Batch:
        """The cohort without some of its requests. Call only while no ticket of the cohort is outstanding."""

    def boundary(self, layer: int, batches: Sequence[Batch]) -> Mapping[str, int]:
        """Cross boundary ``layer`` with all batches as one (their GEMMs are concatenated: weights are read once).

        Returns the sampled token of each request that gets one at the last boundary; empty before. There it also adds
        to ``Request.prompt_logprobs`` what a chunk tells of its prompt, where the request asks for that.
        """

    def gpu_attention(self, layer: int, lane: Batch) -> None:
        """Attention of one layer for the lane: stores the new K and V in each item's tier, prefills and decodes."""

    def whole_iteration(self, lane: Batch) -> Mapping[str, int] | None:
        """All boundaries and attentions of an iteration that is nothing but this lane, and its tokens.

        None: this lane cannot cross all layers in one go. Nothing was done then; take it from layer to layer.
        """

    def submit_cpu_attention(self, layer: int, cohort: Batch) -> Ticket:
        """Hand one layer's decode attention of a cohort (K/V store included) to the CPU worker."""

    def take_logprobs(self) -> Mapping[str, TokenLogprob]:
        """Of the tokens sampled since the last call, for the requests that ask for them."""

    def recover(self) -> None:
        """Start afresh after an iteration that raised: nothing is under way any more, and nobody holds K and V."""

    def close(self) -> None: ...
