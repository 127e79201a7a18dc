"""The terms of the prediction of a real run, added one by one: the ladder of docs/simulator.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from apex.perf.model import FREE, Curve, ProfileTable, Surface
from apex.perf.operator_tables import OperatorTable
from apex.simulator.calibrated_profile import hardware_profile
from apex.simulator.hardware import (
    ASSUMPTIONS_FILE,
    Gpu,
    known_hardware,
    load_gpu,
    load_host,
    load_model_config,
    read_figures,
)
from apex.simulator.operator_files import Operators, read_operators
from apex.simulator.runtime import OWN_ENGINE, Runtime, vllm_runtime
from evaluation.groundtruth.run_files import Run
from swiftllm.model.config import ModelConfig

HOST = "xeon-6342"
"""Whose assumed milliseconds an iteration takes on the host: the same in every host's file."""


@dataclass(frozen=True)
class Setup:
    """A term, with the table and the runtime of a prediction that has it and all terms before it."""

    term: str
    table: ProfileTable
    runtime: Runtime
    prefix_caching: bool = False


def card_of(run: Run) -> Gpu | None:
    """The card in ``configs/hardware`` that the run's operators were measured on."""
    for name in known_hardware("gpu"):
        gpu = load_gpu(name)
        if any(measured.folder.resolve() == run.folder.resolve() for measured in gpu.operators.values()):
            return gpu
    return None


def run_model(run: Run, model: Path | None) -> ModelConfig:
    """The shape of the run's model: that of a folder, or that of its name in ``configs/models``.

    Raises:
        ValueError: neither is known.
    """
    try:
        return load_model_config(model or run.model.rsplit("/", 1)[-1].lower())
    except ValueError as error:
        raise ValueError(f"{run.folder / 'meta.json'}: {error} with --model") from None


def table_of_operators(times: Operators, max_tokens: int) -> OperatorTable:
    """A table of measured operators alone: no CPU tier, and the host's assumed time an iteration."""
    host_s = read_figures(ASSUMPTIONS_FILE)["iteration_overhead_ms"].value * 1e-3
    sizes = sorted({*times.gemm.sizes, *times.elementwise.sizes})
    free = Surface((1, 2), (FREE, FREE))
    return OperatorTable(
        {"kind": "measured operators"},
        linear=Curve(tuple(sizes), tuple(times.gemm(n) + times.elementwise(n) for n in sizes)),
        ends=times.row_ends,
        swap=FREE,
        prefill_attention=times.prefill,
        gpu_attention=times.decode,
        cpu_attention=free,
        iteration=Curve((1, 2), (host_s, host_s)),
        token_ends=times.token_ends,
        mixed_attention=times.mixed,
        unequal=times.unequal,
    )


def all_terms(run: Run) -> Setup:
    """The prediction from the run's own operator tables."""
    table = table_of_operators(read_operators(run.folder), run.max_num_batched_tokens)
    return Setup("all terms", table, vllm_runtime(run.max_num_seqs), prefix_caching=True)


def terms(run: Run, gpu: Gpu, config: ModelConfig) -> Iterator[Setup]:
    """The terms in order, each with those before it. ``gpu`` is the run's card."""
    assumed = read_figures(ASSUMPTIONS_FILE)
    fractions = {name: assumed[name] for name in ("weight_read_fraction", "gemm_fraction")}

    def profile(card: Gpu) -> ProfileTable:
        return hardware_profile(card, load_host(HOST), config, dtype=run.dtype, max_tokens=run.max_num_batched_tokens)

    sheet = replace(gpu, figures={**gpu.figures, **fractions}, layers=(), operators={})
    yield Setup("data sheet", profile(sheet), OWN_ENGINE)
    yield Setup("two fractions of the card", profile(replace(gpu, layers=(), operators={})), OWN_ENGINE)
    linear = profile(replace(gpu, operators={}))
    yield Setup("linear and elementwise by table", linear, OWN_ENGINE)
    full = profile(gpu)
    assert isinstance(full, OperatorTable)
    ends = replace(
        full, gpu_attention=linear.gpu_attention, prefill_attention=linear.prefill_attention,
        mixed_attention=None, unequal=None,
    )  # fmt: skip
    rows = replace(OWN_ENGINE, all_rows_to_end=True)
    yield Setup("all rows cross the last layer; head, sampler", ends, rows)
    yield Setup("attention by table, parts apart", replace(full, mixed_attention=None, unequal=None), rows)
    equal = replace(full, unequal=None)
    yield Setup("mixed batches", equal, rows)
    host = replace(rows, host_beside_gpu=True)
    yield Setup("host beside the GPU", equal, host)
    vllm = vllm_runtime(run.max_num_seqs)
    ahead = replace(host, plans_ahead=True, graph_sizes=vllm.graph_sizes)
    yield Setup("one step of lag, graph padding", equal, ahead)
    yield Setup("whole prompts reserved, null block", equal, vllm)
    yield Setup("own blocks after preemption", equal, vllm, prefix_caching=True)
    yield Setup("unequal contexts", full, vllm, prefix_caching=True)
