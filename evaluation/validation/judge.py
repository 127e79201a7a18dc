"""Judges the simulator by real runs: what it predicts of them from the operator times of their cards.

The terms of the prediction are added one by one: the ladder of docs/simulator.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import yaml
from matplotlib.figure import Figure
from rich.console import Console

from apex.cli.output import table
from apex.perf.model import FREE, Curve, ProfileTable, Surface
from apex.perf.operator_tables import OperatorTable, TimeGrid
from apex.replay.loop import replay_requests
from apex.replay.records import ReplayRequest, RequestRecord
from apex.simulator.backend import OWN_ENGINE, Runtime, vllm_runtime
from apex.simulator.build import build_simulated
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
from evaluation.plots.style import FigureText, save_figure, sheet, tidy_axes
from evaluation.results.folder import ResultFolder
from evaluation.validation.runs import RUNS, RealRun, RunModel, RunRequest, find_model, find_run, read_run
from swiftllm.core.request import Tier

# -- terms of the machine ---------------------------------------------------------------------------------------------

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


# -- the prediction ---------------------------------------------------------------------------------------------------

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
LONGEST = 1 << 20


@dataclass(frozen=True)
class Outcome:
    """What a run comes to, measured or predicted: one entry per request in order of arrival, in seconds.

    ``start_s`` is when requests first held KV blocks; ``queued_s`` when the engine took them in.
    """

    queued_s: np.ndarray
    first_token_s: np.ndarray
    last_token_s: np.ndarray
    output_lens: np.ndarray
    preemptions: int | None = None
    running: np.ndarray | None = None
    waiting: np.ndarray | None = None

    def metrics(self) -> dict[str, float]:
        """Throughput in output tokens/s, TTFT and TPOT in seconds: mean and quantiles."""
        ttft = self.first_token_s - self.queued_s
        tpot = (self.last_token_s - self.first_token_s)[self.output_lens > 1] / (
            self.output_lens[self.output_lens > 1] - 1
        )
        result = {"tokens_per_s": self.output_lens.sum() / (self.last_token_s.max() - self.queued_s.min())}
        for name, values in (("ttft", ttft), ("tpot", tpot)):
            result[f"{name}_mean_s"] = values.mean()
            result |= {f"{name}_{label}_s": np.quantile(values, q) for label, q in QUANTILES.items()}
        return {name: float(value) for name, value in result.items()}


def measured_outcome(run: RealRun) -> Outcome:
    columns = zip(*((r.queued_s, r.first_token_s, r.last_token_s, r.output_len) for r in run.requests), strict=True)
    queued, first, last, lens = map(np.array, columns)
    return Outcome(
        queued,
        first,
        last,
        lens,
        running=np.array([sample.running for sample in run.load]),
        waiting=np.array([sample.waiting for sample in run.load]),
    )


def predict_run(
    run: RealRun,
    table: ProfileTable,
    num_layers: int,
    num_gpu_blocks: int,
    runtime: Runtime,
    *,
    prefix_caching: bool,
) -> Outcome:
    """Simulate the run's requests; the load is sampled at the run's times. Data-parallel ranks take them in turn."""
    parts = [
        _replay(
            run, run.requests[rank :: run.data_parallel], table, num_layers, num_gpu_blocks, runtime, prefix_caching
        )
        for rank in range(run.data_parallel)
    ]
    records = sorted((record for part in parts for record in part), key=lambda record: record.arrival_s)
    running, waiting = load_at([sample.time_s for sample in run.load], records)
    return Outcome(
        np.array([record.tier_history[0][0] for record in records]),
        np.array([record.first_token_s for record in records]),
        np.array([record.last_token_s for record in records]),
        np.array([record.output_len for record in records]),
        sum(record.num_preemptions for record in records),
        running,
        waiting,
    )


def _replay(
    run: RealRun,
    served: Sequence[RunRequest],
    table: ProfileTable,
    num_layers: int,
    num_gpu_blocks: int,
    runtime: Runtime,
    prefix_caching: bool,
) -> Sequence[RequestRecord]:
    """Serve requests by one engine.

    Raises:
        ValueError: one is refused, since the run's limits do not allow it.
    """
    engine = build_simulated(
        "vllm",
        table,
        num_layers,
        num_gpu_blocks=num_gpu_blocks,
        num_cpu_blocks=0,
        block_size=run.block_size,
        max_num_batched_tokens=run.max_num_batched_tokens,
        max_num_seqs=run.max_num_seqs,
        max_model_len=run.max_model_len or LONGEST,
        vocab_size=len(served) + 1,
        cached_tiers=(Tier.GPU,) if prefix_caching else (),
        runtime=runtime,
    )
    requests = [
        # The prompts are not known: every request has a token of its own, so that no two share a prefix.
        ReplayRequest(f"{index}", request.arrival_s, (index + 1,) * request.prompt_len, request.output_len)
        for index, request in enumerate(served)
    ]
    records = replay_requests(engine, requests, wait=engine.backend.sleep).records
    for record in records:
        if not record.completed:
            raise ValueError(f"{run.folder}: a request of {record.prompt_len} tokens is not served: {record.failure}")
    return records


def load_at(times_s: list[float], records: Sequence[RequestRecord]) -> tuple[np.ndarray, np.ndarray]:
    """Running and waiting requests at these times."""
    counts = {"running": np.zeros(len(times_s)), "waiting": np.zeros(len(times_s))}
    times = np.array(times_s)
    for record in records:
        ends = [*(time for time, _ in record.tier_history[1:]), record.finish_s]
        for (begin_s, tier), end_s in zip(record.tier_history, ends, strict=True):
            counts["waiting" if tier == "waiting" else "running"] += (begin_s <= times) & (times < end_s)
    return counts["running"], counts["waiting"]


def errors(measured: Outcome, predicted: Outcome) -> dict[str, float]:
    """Relative errors of every metric, and mean errors of the load in requests."""
    real, simulated = measured.metrics(), predicted.metrics()
    result = {name: simulated[name] / value - 1.0 for name, value in real.items()}
    for name in ("running", "waiting"):
        result[f"{name}_requests"] = float(np.abs(getattr(predicted, name) - getattr(measured, name)).mean())
    return result


# -- the judgement ----------------------------------------------------------------------------------------------------

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


# -- the report --------------------------------------------------------------------------------------------------------
# Prints and draws real runs beside their predictions: what `apex validate --run` shows.

UNITS = {"tokens_per_s": (1.0, "output tokens/s", ".0f"), "ttft": (1.0, "s", ".2f"), "tpot": (1e3, "ms", ".1f")}
LADDER = ("tokens_per_s", "ttft_mean_s", "ttft_p99_s", "tpot_mean_s")
WIDTH, HEIGHT = 7.2, 2.0  # inches, of the figure and of each of its axes
MEASURED, PREDICTED = "#222222", "#C0392B"


def print_comparison(run: RealRun, measured: Outcome, predicted: Outcome, console: Console) -> None:
    real, simulated, off = measured.metrics(), predicted.metrics(), errors(measured, predicted)
    rows = []
    for name in real:
        factor, unit, form = UNITS[name if name in UNITS else name[:4]]
        label = unit if name in UNITS else f"{name[:4].upper()} {name.split('_')[1]}, {unit}"
        values = (format(values[name] * factor, form) for values in (real, simulated))
        rows.append((label, *values, f"{off[name]:+.1%}"))
    for name in ("running", "waiting"):
        means = (f"{getattr(outcome, name).mean():.1f}" for outcome in (measured, predicted))
        rows.append((f"{name} requests, mean", *means, f"{off[f'{name}_requests']:.1f} off"))
    console.print(f"{run.name}: {run.model} in vLLM, measured and SIMULATED", highlight=False)
    console.print(table(("metric", "measured", "SIMULATED", "error"), rows, left=("metric",)))


def print_terms(rows: Sequence[tuple[str, Mapping[str, float]]], console: Console) -> None:
    titles = ("term", "tokens/s", "TTFT mean", "TTFT p99", "TPOT mean", "running", "waiting")
    shown = [
        (
            term,
            *(f"{100 * off[name]:+.1f}" for name in LADDER),
            *(f"{off[name]:.1f}" for name in ("running_requests", "waiting_requests")),
        )
        for term, off in rows
    ]
    console.print("Errors in % (running and waiting: in requests), terms added in order", highlight=False)
    console.print(table(titles, shown, left=("term",)))


def draw_run(run: RealRun, measured: Outcome, predicted: Outcome) -> Figure:
    """Running and waiting requests over time, and the distributions of TTFT and TPOT."""
    times_s = [sample.time_s for sample in run.load]
    text = FigureText(
        f"SIMULATED against a real run: {run.name}",
        f"{run.model}, vLLM; {len(run.requests)} requests",
        "Black: measured. Red: SIMULATED from operator times of the card.",
    )
    figure, axes = sheet(text, 2, 2, width=WIDTH, height=HEIGHT)
    for outcome, colour in ((measured, MEASURED), (predicted, PREDICTED)):
        for axis, name in zip(axes.flat[:2], ("running", "waiting"), strict=True):
            axis.plot(times_s, getattr(outcome, name), color=colour, linewidth=1.0)
            axis.set(xlabel="s", ylabel=f"{name} requests")
        spans_s = (outcome.last_token_s - outcome.first_token_s) / np.maximum(outcome.output_lens - 1, 1)
        share = np.linspace(0, 1, len(spans_s))
        axes.flat[2].plot(np.sort(outcome.first_token_s - outcome.queued_s), share, color=colour, linewidth=1.0)
        axes.flat[3].plot(np.sort(spans_s) * 1e3, share, color=colour, linewidth=1.0)
    axes.flat[2].set(xlabel="time to first token, s", ylabel="share of requests")
    axes.flat[3].set(xlabel="time per output token, ms", ylabel="share of requests")
    for axis in axes.flat:
        tidy_axes(axis)
    return figure


# -- the command -------------------------------------------------------------------------------------------------------


def show_runs(runs: Sequence[str], model: Path | None, results_dir: Path, console: Console, *, with_terms: bool) -> int:
    """Print and draw each run beside its prediction. ``with_terms`` adds the errors term by term.

    Returns:
        The exit status: 1 where an error exceeds the recorded one by more than a point.

    Raises:
        ValueError: a run is unknown, a file of it is missing or malformed, or its model is unknown.
    """
    judged = [judge(run, model) for run in runs]
    folder = ResultFolder("real-runs", {"runs": [result.run.name for result in judged]}, results_dir)
    folder.record_invocation()
    for result in judged:
        print_comparison(result.run, result.measured, result.predicted, console)
        for line in remarks(result):
            console.print(line, highlight=False, soft_wrap=True)
        if with_terms:
            print_terms(list(ladder(result)), console)
        save_figure(draw_run(result.run, result.measured, result.predicted), folder.path, result.run.name)
    rows = [{"run": result.run.name, **result.errors} for result in judged]
    folder.save_summary(rows, "\n".join(f"- {row}" for row in rows))
    console.print(f"written to {folder.path}", highlight=False, soft_wrap=True)
    known = recorded_errors()
    worse = [line for result in judged if result.run.name in known for line in worse_than_recorded(result)]
    for line in worse:
        console.print(f"[red]worse than recorded[/]: {line}", soft_wrap=True)
    return 1 if worse else 0


def remarks(judged: Judged) -> list[str]:
    """What the prediction of a run leaves out, or takes for granted."""
    run, lines = judged.run, ["the prompts of the run are not known: no request finds the prefix of another one"]
    if run.num_gpu_blocks is None:
        lines.append("the run did not record its KV blocks: there are enough for all requests")
    if run.tensor_parallel > 1:
        link = link_of(run)
        if link is None:
            lines.append(
                "the tables have no communication between the GPUs of a layer, and what joins them is not known: it is "
                'left out (meta.json may name a "link")'
            )
        else:
            lines.append(f"communication between the GPUs is by the figures of {link.name} in configs/hardware")
    if run.data_parallel > 1:
        lines.append("the ranks take requests in turn and are equally loaded; their link is assumed")
    return lines
