"""A share of this machine for one of several engines on it: cores, memory, and GPUs or a part of one.

Plain Python: a share must be taken before torch is loaded, whose threads inherit the cores.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from swiftllm import machine
from swiftllm.topology import SYSTEM, equal_parts, in_node_order, numa_nodes


@dataclass(frozen=True)
class Share:
    """Part ``number`` of ``parts`` equal parts, counted from 1."""

    number: int
    parts: int

    @classmethod
    def parse(cls, text: str) -> Share:
        """From text such as ``1/4``.

        Raises:
            ValueError: it is no such text.
        """
        match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise ValueError(f"share={text!r} must be like 1/4 for the first of four engines, up to 4/4")
        return cls(int(match[1]), int(match[2]))

    def cores_of(self, cores: Sequence[int]) -> list[int]:
        """The cores of this part. Parts are adjacent, differ by one core at most, and there is at least one core each.

        Raises:
            ValueError: there are fewer cores than parts.
        """
        if len(cores) < self.parts:
            raise ValueError(f"share={self.number}/{self.parts}: there are {len(cores)} cores for {self.parts} engines")
        return equal_parts(cores, self.parts)[self.number - 1]

    def cards_of(self, cards: Sequence[str]) -> tuple[list[str], float]:
        """The GPUs of this part, and its fraction of each: whole GPUs, or a part of a single one.

        Raises:
            ValueError: the GPUs cannot be divided so that each engine has whole ones or shares one with as many others.
        """
        count = len(cards)
        if count % self.parts == 0:
            each = count // self.parts
            return list(cards[(self.number - 1) * each : self.number * each]), 1.0
        if self.parts % count == 0:
            on_each = self.parts // count
            return [cards[(self.number - 1) // on_each]], 1 / on_each
        raise ValueError(f"share={self.number}/{self.parts}: {count} GPUs cannot be divided among {self.parts} engines")


def take_share(share: Share) -> None:
    """Confine this process to its share: cores, whose NUMA node its memory then comes from, memory and GPUs.

    Raises:
        ValueError: the machine cannot be divided so.
    """
    cores = share.cores_of(in_node_order(os.sched_getaffinity(0), numa_nodes(SYSTEM)))
    cards, of_card = visible_cards(), 1.0
    if cards:
        cards, of_card = share.cards_of(cards)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(cards)
    os.sched_setaffinity(0, cores)
    machine.limit_use(of_host=1 / share.parts, of_card=of_card)


def visible_cards() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(index) for index in range(len(machine.installed_cards()))]
    return [] if visible.strip() in ("", "-1") else [name.strip() for name in visible.split(",")]
