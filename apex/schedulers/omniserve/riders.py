"""Piggybacking (OmniServe section 3.3.6): which cohorts ride the lane, and who starts a new one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from apex.perf.lane_load import LaneLoad
from apex.perf.model import PerfModel
from apex.schedulers.cpu_decodes import longest_run
from apex.schedulers.omniserve.lane import Riders
from apex.schedulers.omniserve.times import riders_s
from swiftllm.core.request import Request
from swiftllm.scheduling.cohorts import Cohort


def choose_riders(
    model: PerfModel,
    load: LaneLoad,
    under_way: Sequence[Cohort],
    ready: Sequence[Request],
    spare_s: float,
    *,
    most_cohorts: int,
    overdue: Request | None,
) -> tuple[list[Cohort], list[Request]]:
    """Cohorts that may ride their next boundary in ``spare_s``, oldest first, and members of a new cohort.

    The request that is overdue comes first, alone or with its cohort, whatever the time. (The paper begins with the
    lowest layer, where cohorts that have come far would starve behind those that start.)
    """
    riders, riding = Counter[int](), []
    under_way = sorted(under_way, key=lambda cohort: (overdue not in cohort.members, cohort.cohort_id))
    for cohort in under_way:
        cost_s = added_s(model, load, riders[cohort.boundary], len(cohort.members), cohort.boundary)
        if cost_s <= spare_s or not load.requests or overdue in cohort.members:
            spare_s -= cost_s
            riders[cohort.boundary] += len(cohort.members)
            riding.append(cohort)
    starting = []
    if len(under_way) < most_cohorts:
        before = riders[-1]
        count = longest_run(lambda rows: added_s(model, load, before, rows, -1), spare_s, len(ready))
        starting = list(ready[:count])
    if overdue in ready and overdue not in starting:
        starting = [*starting[:-1], overdue]
    return riding, starting


def added_s(model: PerfModel, load: LaneLoad, rows_before: int, rows: int, boundary: int) -> float:
    """What more rows at a boundary add to the iteration, in seconds."""
    after_s = riders_s(model, load.tokens, load.sampled, {boundary: rows_before + rows})
    if not rows_before:
        return after_s
    return after_s - riders_s(model, load.tokens, load.sampled, {boundary: rows_before})


def rows_by_boundary(riding: Sequence[Cohort], starting: Sequence[Request]) -> Riders:
    rows = Counter({-1: len(starting)} if starting else {})
    for cohort in riding:
        rows[cohort.boundary] += len(cohort.members)
    return rows
