"""The points of an experiment as a grid: panels of an experiment file, whose lists are axes.

    system: [swiftllm, adaptive]
    quick: {num_requests: 40}
    panels:
      - {setting: apex-a10, input_len: 1000, output_len: [50, 200], num_requests: 300}
      - {setting: apex-t4, workload: osc, num_requests: 300, quick: {num_requests: 20}}

Other entries of the section are fields of every panel that does not have them itself. A list is an axis. A mapping in a
list sets several fields together. A variant (here ``quick``) is laid over the panels when it is asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Place = dict[str, Any]
"""A point of a grid: one value for each field, None where it has none or does not depend on it."""
Panel = Mapping[str, Any]
"""Fields in the order of the axes, the last of which varies fastest."""
VARIANTS = ("quick", "sensitivity", "rehearsal")


@dataclass(frozen=True)
class Grid:
    panels: tuple[Panel, ...]

    @classmethod
    def read(
        cls, section: Mapping[str, Any], known: Collection[str], variant: str | None = None, notes: Collection[str] = ()
    ) -> Grid:
        """The grid of a section of an experiment file.

        Args:
            known: fields that a panel may have.
            variant: one of ``VARIANTS`` to lay over the panels.
            notes: entries of the section that are not about its points.

        Raises:
            ValueError: the section has other entries than these; the message names them.
        """
        shared = {name: value for name, value in section.items() if name not in ("panels", *notes)}
        own = section.get("panels", ({},))
        given = dict.fromkeys(field for panel in (shared, *own) for field in _fields(panel))
        if unknown := [name for name in given if name not in known]:
            which = ", ".join((*VARIANTS, *sorted(known)))
            raise ValueError(f"an experiment file has no {', '.join(unknown)} in its panels; they may have {which}")
        panels = []
        for panel in own:
            fields = {**panel, **{name: value for name, value in shared.items() if name not in panel}}
            laid_over = {**shared.get(variant, {}), **panel.get(variant, {})}
            plain = {name: value for name, value in fields.items() if name not in VARIANTS}
            panels.append(_with(plain, laid_over))
        return cls(tuple(panels))

    def with_(self, **fields: Any) -> Grid:
        """The grid with other values in all panels. Fields that a panel does not have come last."""
        return Grid(tuple(_with(panel, fields) for panel in self.panels))

    def only(self, what: str, values: Collection[Any] | None, of: Callable[[Panel], Any] | None = None) -> Grid:
        """The points whose field ``what`` has one of the values; the whole grid for None.

        ``of`` gives the value of a whole panel, for what is not a field of it.

        Raises:
            ValueError: no point has one of the values; the message lists those there are.
        """
        if values is None:
            return self
        entries = [_entries(what, panel.get(what) if of is None else of(panel)) for panel in self.panels]
        known = dict.fromkeys(entry.get(what) for those in entries for entry in those)
        if unknown := [str(value) for value in values if value not in known]:
            there = ", ".join(str(value) for value in known)
            raise ValueError(f"no {what} {', '.join(unknown)} in the experiment file; there are {there}")
        panels = []
        for panel, those in zip(self.panels, entries, strict=True):
            kept = [entry for entry in those if entry.get(what) in values]
            if kept:
                panels.append({**panel, what: kept} if _is_axis(panel.get(what)) else panel)
        return Grid(tuple(panels))

    def places(self, concerns: Callable[[str, Place], bool] = lambda field, place: True) -> list[Place]:
        """The points, in the order of panels and axes.

        ``concerns`` says whether a point depends on a field of an axis. One that does not is there once, with None.
        """
        return [place for panel in self.panels for place in _places(panel, concerns)]


def values_of(panel: Panel, field: str) -> list[Any]:
    """The values that a panel has for a field; none where it has no such field."""
    entries = [entry for name, value in panel.items() for entry in _entries(name, value)]
    return list(dict.fromkeys(entry[field] for entry in entries if field in entry))


def _with(panel: Panel, fields: Mapping[str, Any]) -> Panel:
    """The panel with these fields, which no entry of another axis sets any more."""
    left = {}
    for name, value in panel.items():
        if _is_axis(value) and name not in fields:
            value = [{key: one for key, one in entry.items() if key not in fields} for entry in _entries(name, value)]
        left[name] = value
    return {**left, **fields}


def _places(panel: Panel, concerns: Callable[[str, Place], bool]) -> Iterator[Place]:
    fixed = {name: value for name, value in panel.items() if not _is_axis(value)}
    axes = [_entries(name, value) for name, value in panel.items() if _is_axis(value)]
    varied = {field: None for axis in axes for entry in axis for field in entry}
    seen = []
    for entries in itertools.product(*axes):
        place = fixed | varied
        for entry in entries:
            place |= entry
        place |= {field: None for field in varied if not concerns(field, place)}
        if place not in seen:
            seen.append(place)
            yield place


def _fields(panel: Panel) -> Iterator[str]:
    """The fields that a panel sets, those of its variants too. An axis of mappings has any name."""
    for name, value in panel.items():
        if name in VARIANTS:
            yield from _fields(value)
        else:
            yield from (field for entry in _entries(name, value) for field in entry)


def _entries(name: str, value: Any) -> list[Panel]:
    """The values of a field, each as the fields that it sets."""
    values = value if _is_axis(value) else [value]
    return [entry if isinstance(entry, Mapping) else {name: entry} for entry in values]


def _is_axis(value: Any) -> bool:
    return isinstance(value, (list, tuple, range))
