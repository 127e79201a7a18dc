"""What simulated rows rest on, in words for figures: how well their card is known, and which vLLM is meant."""

from __future__ import annotations

import re
from collections.abc import Iterable

from apex.simulator.backend import PAPERS_VLLM, VLLM, VLLM_DEFAULTS
from evaluation.results.folder import FlatRecord
from evaluation.results.kinds import is_simulated


def known_notes(records: Iterable[FlatRecord]) -> list[str]:
    """A note for each card and model of simulated rows, and one where `vllm` is among their systems.

    Cards and models that are not in ``configs``, such as the machine's own or a folder that is gone, have no note.
    """
    from apex.simulator.hardware_files import known_hardware, known_models, load_gpu, load_model_config
    from apex.simulator.predicted_profile import how_known  # late: reading models imports torch

    simulated = [record for record in records if is_simulated(record)]
    cards, models, notes = {gpu.name: gpu for gpu in map(load_gpu, known_hardware("gpu"))}, known_models(), []
    for gpus, model in dict.fromkeys((record["gpu"], record["model"]) for record in simulated):
        card = cards.get(re.sub(r"^\d+x ", "", gpus))
        if card is not None and model in models:
            notes.append(f"{card.name} is known from {how_known(card, load_model_config(model))}.")
    for record in simulated:
        if record["system"] == VLLM:
            notes.append(f"{VLLM}: {VLLM_DEFAULTS if record.get('vllm_defaults') else PAPERS_VLLM}.")
    return list(dict.fromkeys(notes))
