"""What simulated rows rest on, in words for figures: how well their card is known, and which vLLM is meant."""

from __future__ import annotations

from collections.abc import Sequence

from apex.simulator.runtime import PAPERS_VLLM, VLLM, VLLM_DEFAULTS
from evaluation.results.folder import FlatRecord
from evaluation.results.kinds import is_simulated


def known_notes(records: Sequence[FlatRecord]) -> list[str]:
    """A note for each card of simulated rows in a paper's setting, and one where `vllm` is among their systems."""
    from apex.simulator.calibrated_profile import how_known  # late: reading models imports torch
    from apex.simulator.hardware import load_gpu
    from apex.simulator.paper_settings import load_setting

    simulated = [record for record in records if is_simulated(record) and record.get("setting")]
    notes = {}
    for name in dict.fromkeys(record["setting"] for record in simulated):
        setting = load_setting(name)
        gpu = load_gpu(setting.gpu)
        notes[f"{gpu.name} is known from {how_known(gpu, setting.model_config)}."] = None
    for record in simulated:
        if record["system"] == VLLM:
            notes[f"{VLLM}: {VLLM_DEFAULTS if record.get('vllm_defaults') else PAPERS_VLLM}."] = None
    return list(notes)
