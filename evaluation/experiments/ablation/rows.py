"""The rows of the ablation: a system, and what is changed about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from apex.cli.output import strategy_mix
from apex.replay.metrics import predicted_over_actual
from apex.strategy import StrategyConfig
from evaluation.experiments.axes import IDEAS
from evaluation.experiments.runner import PointResult

BASELINE = "swiftllm"


@dataclass(frozen=True)
class AblationRow:
    """A row of the table: a system and its changed settings. A simulation has no ``synchronous`` CPU attention."""

    name: str
    system: str
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    synchronous: bool = False


ROWS = {
    row.name: row
    for row in (
        AblationRow(BASELINE, "swiftllm"),
        AblationRow("neo", "neo"),
        AblationRow("fastdecode", "fastdecode"),
        AblationRow("apex", "apex"),
        AblationRow("force-pipelining", "apex", StrategyConfig(strategy="asymmetric-pipelining")),
        AblationRow("force-overlap", "apex", StrategyConfig(strategy="asynchronous-overlap")),
        AblationRow("no-pipelining", "apex", StrategyConfig(disable_asymmetric_pipelining=True)),
        AblationRow("no-overlap", "apex", StrategyConfig(disable_asynchronous_overlap=True)),
        AblationRow("no-threshold", "apex", StrategyConfig(min_cpu_request_ratio=0)),
        AblationRow("synchronous", "apex", synchronous=True),
        AblationRow("adaptive", "adaptive"),
        AblationRow("adaptive-synchronous", "adaptive", synchronous=True),
        *(AblationRow(f"adaptive-no-{idea}", "adaptive", strategy) for idea, strategy in IDEAS.items()),
    )
}
MEANINGS = (
    "neo, fastdecode and apex are as in their papers; the rows up to synchronous are variants of apex. force-*: one "
    "strategy forced (overlap without its threshold); no-*: one strategy disabled; no-threshold: overlap with any "
    "number of CPU requests; *synchronous: CPU attention inline, no overlap. adaptive is this project's own scheduler; "
    "adaptive-no-*: without one of its three ideas"
)


def chosen_rows(names: Sequence[str] | None, simulated: bool) -> list[AblationRow]:
    """The rows of these names; without names all that can be run.

    Raises:
        ValueError: there is no such row; the message lists those there are.
    """
    there = {name: row for name, row in ROWS.items() if not (simulated and row.synchronous)}
    if unknown := [name for name in names or () if name not in there]:
        which = " that can be simulated" if simulated else ""
        raise ValueError(f"no rows {', '.join(unknown)}{which}; there are {', '.join(there)}")
    return [there[name] for name in names or there]


def with_mix(result: PointResult) -> PointResult:
    """The result with what its strategies were, and how well iterations were predicted."""
    stats = result.details["engine_stats"]
    mix = {
        "strategy_mix": strategy_mix(stats["strategy_iterations"]),
        "predicted_over_actual": predicted_over_actual(stats),
    }
    return replace(result, values={**result.values, **mix})
