"""The terms of the prediction of a real run, added one by one: the ladder of docs/simulator.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from apex.perf.model import FREE, Curve, ProfileTable, Surface
from apex.perf.operator_tables import OperatorTable, TimeGrid
from apex.simulator.backend import OWN_ENGINE, Runtime, vllm_runtime
from apex.simulator.hardware_files import (
    ASSUMPTIONS_FILE,
    Gpu,
    GpuLink,
    known_hardware,
    load_gpu,
    load_host,
    load_link,
    load_model_config,
    read_figures,
    read_operators,
)
from apex.simulator.predicted_profile import ITEMSIZES, all_gather_s, all_reduce_s, hardware_profile, with_all_reduces
from evaluation.groundtruth.models import RunModel
from evaluation.groundtruth.run_files import RealRun

LINK = "pcie-4"
"""What joins data-parallel ranks that exchange tokens between experts; assumed."""
HOST = "xeon-6342"
"""Whose assumed milliseconds an iteration takes on the host: the same in every host's file."""


@dataclass(frozen=True)
class Setup:
    """A term, with the table and the runtime of a prediction that has it and all terms before it."""

    term: str
    table: ProfileTable
    runtime: Runtime
    prefix_caching: bool = False


def card_of(run: RealRun) -> Gpu | None:
    """The card in ``configs/hardware`` that the run's operators were measured on."""
    for name in known_hardware("gpu"):
        gpu = load_gpu(name)
        if any(measured.folder.resolve() == run.folder.resolve() for measured in gpu.operators.values()):
            return gpu
    return None


def link_of(run: RealRun) -> GpuLink | None:
    """What joins the GPUs of a run: what it names, else what joins cards of its name; None where neither is known.

    Raises:
        ValueError: there is no such link.
    """
    if run.link is not None:
        return load_link(run.link)
    named = [gpu for name in known_hardware("gpu") if (gpu := load_gpu(name)).link and is_named(run, name)]
    return load_link(named[0].link) if named else None


def is_named(run: RealRun, card: str) -> bool:
    """Whether the run's device or, where it has none, its folder has a card's name: whole words, however joined."""
    words, wanted = re.findall(r"[a-z0-9]+", (run.device or run.name).lower()), card.replace("-", "")
    return any("".join(words[i:j]) == wanted for i in range(len(words)) for j in range(i + 1, len(words) + 1))


def table_of_operators(run: RealRun, model: RunModel) -> OperatorTable:
    """A table of the run's operators alone: no CPU tier, and the host's assumed time an iteration.

    Of a mixture of experts, all ranks have batches of one size, and each token picks its experts at random.
    """
    times, ranks = read_operators(run.folder), run.data_parallel
    host_s = read_figures(ASSUMPTIONS_FILE)["iteration_overhead_ms"].value * 1e-3
    sizes = sorted({*times.gemm.sizes, *times.elementwise.sizes})
    linear = [times.gemm(n) + times.elementwise(n) for n in sizes]
    if times.experts is not None:
        linear = [seconds + experts_s(times.experts, n, ranks) for n, seconds in zip(sizes, linear, strict=True)]
    if times.experts is not None and ranks > 1:
        link, bytes_per_token = load_link(LINK), ranks * model.hidden_size * ITEMSIZES[run.dtype]
        exchanges = [
            2 * all_reduce_s(link, n * bytes_per_token, ranks) for n in sizes
        ]  # all tokens there, and their sums back
        linear = [seconds + exchange_s for seconds, exchange_s in zip(linear, exchanges, strict=True)]
    free = Surface((1, 2), (FREE, FREE))
    return OperatorTable(
        {"kind": "measured operators"},
        linear=Curve(tuple(sizes), tuple(linear)),
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


def experts_s(experts: TimeGrid, tokens: float, ranks: int) -> float:
    """A layer's experts on one of the ranks that divide them, with ``tokens`` on each rank.

    A rank computes its part of the experts for the tokens of all.
    """
    fewest, *_, all_experts = sorted(experts.sizes_after(experts.sizes[-1]))
    tokens *= ranks
    idle = (1.0 - fewest / all_experts) ** tokens
    return experts(tokens, all_experts / ranks * (1.0 - idle))


def with_layer_all_reduces(table: OperatorTable, run: RealRun, model: RunModel, link: GpuLink) -> OperatorTable:
    """A table of shards with the all-reduces of their layers, which nothing hides: vLLM's are on the stream of all
    else."""
    gpus, itemsize = run.tensor_parallel, ITEMSIZES[run.dtype]
    return replace(table, linear=with_all_reduces(table.linear, link, model.hidden_size, itemsize, gpus))


def with_end_exchanges(table: OperatorTable, run: RealRun, model: RunModel, link: GpuLink) -> OperatorTable:
    """A table of shards with the exchanges of a step at its ends: an all-reduce of the embedding, of which each GPU has
    a part of the vocabulary, and an all-gather of the logits."""
    gpus, itemsize = run.tensor_parallel, ITEMSIZES[run.dtype]
    rows, vocab = table.ends, model.vocab_size / gpus
    gathered = [all_gather_s(link, n * vocab * itemsize, gpus) for n in rows.sizes]
    return replace(
        table,
        token_ends=with_all_reduces(table.token_ends, link, model.hidden_size, itemsize, gpus, count=1),
        ends=Curve(rows.sizes, tuple(head + gather for head, gather in zip(rows.seconds, gathered, strict=True))),
    )


def shard_terms(run: RealRun, model: RunModel) -> Iterator[Setup]:
    """The terms of a tensor-parallel run, whose tables are of a shard: those without its link as of any run."""
    vllm, table, link = vllm_runtime(run.max_num_seqs), table_of_operators(run, model), link_of(run)
    yield Setup("operators of a shard", table, vllm, prefix_caching=True)
    if link is not None:
        layers = with_layer_all_reduces(table, run, model, link)
        yield Setup("all-reduces", layers, vllm, prefix_caching=True)
        ends = with_end_exchanges(layers, run, model, link)
        yield Setup("embedding and logits exchanged", ends, vllm, prefix_caching=True)


def all_terms(run: RealRun, model: RunModel) -> Setup:
    """The prediction from the run's own operator tables, and from the figures of its link."""
    if run.tensor_parallel > 1:
        return list(shard_terms(run, model))[-1]
    return Setup("all terms", table_of_operators(run, model), vllm_runtime(run.max_num_seqs), prefix_caching=True)


def terms(run: RealRun, gpu: Gpu) -> Iterator[Setup]:
    """The terms in order, each with those before it. ``gpu`` is the run's card."""
    assumed, config = read_figures(ASSUMPTIONS_FILE), load_model_config(run.model.rsplit("/", 1)[-1].lower())
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
