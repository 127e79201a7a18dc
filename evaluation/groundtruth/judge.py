"""Judges the simulator by real runs: what it predicts of them from the operator times of their cards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from evaluation.groundtruth.models import RunModel, find_model
from evaluation.groundtruth.prediction import Outcome, measured_outcome, predict_run
from evaluation.groundtruth.report import errors
from evaluation.groundtruth.run_files import RUNS, RealRun, find_run, read_run
from evaluation.groundtruth.terms import Setup, all_terms, card_of, shard_terms, terms

ERRORS_FILE = RUNS / "errors.yaml"
TOLERANCE = 0.01
"""By how much an error may exceed the recorded one: a point."""


@dataclass(frozen=True)
class Judged:
    """A real run, and its prediction with all terms."""

    run: RealRun
    model: RunModel
    measured: Outcome
    predicted: Outcome

    @property
    def errors(self) -> dict[str, float]:
        return errors(self.measured, self.predicted)


def judge(name_or_folder: str | Path, model_folder: Path | None = None) -> Judged:
    """Predict a run from its own operator tables. ``model_folder`` has the config.json of a model that is unknown.

    Raises:
        ValueError: there is no such run, a file of it is missing or malformed, or its model is unknown.
    """
    run = read_run(find_run(name_or_folder))
    model = find_model(run.model, model_folder)
    return Judged(run, model, measured_outcome(run), predict(run, model, all_terms(run, model)))


def predict(run: RealRun, model: RunModel, setup: Setup) -> Outcome:
    caching = setup.prefix_caching
    return predict_run(run, setup.table, model.num_layers, pool_blocks(run), setup.runtime, prefix_caching=caching)


def ladder(judged: Judged) -> Iterator[tuple[str, dict[str, float]]]:
    """The errors with each further term; nothing for a run of one GPU whose card is not in ``configs/hardware``."""
    gpu, setups = card_of(judged.run), iter(())
    if judged.run.tensor_parallel > 1:
        setups = shard_terms(judged.run, judged.model)
    elif gpu is not None:
        setups = terms(judged.run, gpu)
    for setup in setups:
        yield setup.term, errors(judged.measured, predict(judged.run, judged.model, setup))


def pool_blocks(run: RealRun) -> int:
    """Blocks of the run's pool; where it was not recorded, as many as all requests need at once."""
    if run.num_gpu_blocks is not None:
        return run.num_gpu_blocks
    return 1 + sum(-(-(r.prompt_len + r.output_len) // run.block_size) for r in run.requests)


def recorded_errors() -> Mapping[str, Mapping[str, float]]:
    """The errors at the last change of the simulator, by run and metric."""
    return yaml.safe_load(ERRORS_FILE.read_text(encoding="utf-8"))


def worse_than_recorded(judged: Judged) -> list[str]:
    """The metrics whose error exceeds the recorded one by more than a point, each with both."""
    recorded = recorded_errors()[judged.run.name]
    now = judged.errors
    return [
        f"{name}: {now[name]:+.1%}, recorded {error:+.1%}"
        for name, error in recorded.items()
        if abs(now[name]) > abs(error) + TOLERANCE
    ]
