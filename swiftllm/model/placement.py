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


@dataclass(frozen=True)
class Placement:
    """``places[i]`` is that of stage ``i - 1``."""

    places: tuple[Place, ...]
    embedding_on_host: bool = False
    """Whether the embedding is in host memory, from which the GPU reads the rows of an iteration's tokens."""

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

    def bytes_at(self, place: Place, stage_bytes: Sequence[float]) -> float:
        """Bytes of the stages at a place."""
        return sum(size for size, at in zip(stage_bytes, self.places, strict=True) if at is place)

    def gpu_bytes(self, stage_bytes: Sequence[float]) -> float:
        """GPU memory that the stages take: those that are resident, and the slots of those that are streamed."""
        streamed = (size for size, at in zip(stage_bytes, self.places, strict=True) if at is Place.STREAMED)
        return self.bytes_at(Place.RESIDENT, stage_bytes) + SLOTS * max(streamed, default=0.0)

    def describe(self) -> str:
        counts = ((self.count(Place.RESIDENT), "resident"), (self.count(Place.STREAMED), "streamed"))
        parts = [f"{count} {what}" for count, what in (*counts, (self.count(Place.CPU), "on the CPU")) if count]
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


def _evenly(size: int, chosen: int) -> list[int]:
    """``chosen`` of ``range(size)``, as equally far from each other as may be."""
    return [(2 * i + 1) * size // (2 * chosen) for i in range(chosen)]
