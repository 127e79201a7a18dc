"""A placement: where the weights of a model are, stage by stage. These count from -1 to ``num_layers - 1``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

SLOTS = 2
"""Stages on the GPU, of those that are streamed: while one is used, the next arrives."""


class Place(StrEnum):
    """Where the weights of a stage are.

    Streamed ones are in host memory and are copied to a slot on the GPU in each iteration. CUDA streams are another
    matter.
    """

    RESIDENT = "resident"
    STREAMED = "streamed"
    CPU = "cpu"
    EXPERTS = "experts"
    """All but the experts of a layer is resident. These are in host memory: of few rows the CPU computes them, for many
    rows they are copied to the GPU."""


@dataclass(frozen=True)
class Placement:
    """``places[i]`` is that of stage ``i - 1``."""

    places: tuple[Place, ...]
    embedding_on_host: bool = False
    """Whether the embedding is in host memory, from which the GPU reads the rows of an iteration's tokens."""
    most_cpu_rows: int = 0
    """With more rows than this, experts in host memory are copied to the GPU."""

    def __post_init__(self) -> None:
        if Place.STREAMED in self.places and Place.EXPERTS in self.places:
            raise ValueError("a placement has streamed stages or experts in host memory, not both")

    @property
    def num_layers(self) -> int:
        return len(self.places) - 1

    @property
    def is_all_resident(self) -> bool:
        return self.count(Place.RESIDENT) == len(self.places)

    def at(self, layer: int) -> Place:
        """The place of stage ``layer``, from -1."""
        return self.places[layer + 1]

    def count(self, place: Place) -> int:
        return self.places.count(place)

    def waits_for_cpu(self, layer: int) -> bool:
        """Whether the CPU may compute of stage ``layer``, so that no graph can be captured of it."""
        return self.at(layer) in (Place.CPU, Place.EXPERTS)

    def bytes_at(self, place: Place, stage_bytes: Sequence[float]) -> float:
        """Bytes of the stages at a place."""
        return sum(size for size, at in zip(stage_bytes, self.places, strict=True) if at is place)

    def gpu_bytes(self, stage_bytes: Sequence[float], expert_bytes: Sequence[float] = ()) -> float:
        """GPU memory that the stages take: what is resident, and the slots of what is copied to them.

        ``expert_bytes``: of the stages' bytes those of experts, where some are at :attr:`Place.EXPERTS`.
        """
        at = Place.EXPERTS if Place.EXPERTS in self.places else Place.STREAMED
        copied = expert_bytes if at is Place.EXPERTS else stage_bytes
        slot = max((size for size, place in zip(copied, self.places, strict=False) if place is at), default=0.0)
        return sum(stage_bytes) - self.host_bytes(stage_bytes, expert_bytes) + SLOTS * slot

    def host_bytes(self, stage_bytes: Sequence[float], expert_bytes: Sequence[float] = ()) -> float:
        """Bytes of the stages that are in host memory; ``expert_bytes``: see :meth:`gpu_bytes`."""
        whole = self.bytes_at(Place.STREAMED, stage_bytes) + self.bytes_at(Place.CPU, stage_bytes)
        return whole + (self.bytes_at(Place.EXPERTS, expert_bytes) if Place.EXPERTS in self.places else 0.0)

    def describe(self) -> str:
        words = {
            Place.RESIDENT: "resident",
            Place.STREAMED: "streamed",
            Place.CPU: "on the CPU",
            Place.EXPERTS: f"with their experts in host memory (on the CPU up to {self.most_cpu_rows} rows)",
        }
        parts = [f"{self.count(place)} {what}" for place, what in words.items() if self.count(place)]
        embedding = "; the embedding in host memory" if self.embedding_on_host else ""
        return f"{len(self.places)} stages: {', '.join(parts)}{embedding}"


def all_resident(num_layers: int) -> Placement:
    return Placement((Place.RESIDENT,) * (num_layers + 1))


def spread(num_stages: int, streamed: int, on_cpu: int) -> Placement:
    """A placement with these numbers of stages, spread evenly over the model; the others are resident.

    Copies overlap with all that lies between two streamed stages. Equal distances keep the link at work with two
    slots. The stages of the CPU are spread over the rest for the same reason.
    """
    places = [Place.RESIDENT] * num_stages
    for index in _evenly(num_stages, streamed):
        places[index] = Place.STREAMED
    rest = [index for index, place in enumerate(places) if place is Place.RESIDENT]
    for index in _evenly(len(rest), on_cpu):
        places[rest[index]] = Place.CPU
    return Placement(tuple(places))


def with_experts_on_host(num_stages: int, count: int) -> Placement:
    """A placement with the experts of so many stages in host memory, spread evenly; the first stage has none."""
    places = [Place.RESIDENT] * num_stages
    for index in _evenly(num_stages - 1, count):
        places[index + 1] = Place.EXPERTS
    return Placement(tuple(places))


def _evenly(size: int, chosen: int) -> list[int]:
    """``chosen`` of ``range(size)``, as equally far from each other as may be."""
    return [(2 * i + 1) * size // (2 * chosen) for i in range(chosen)]
