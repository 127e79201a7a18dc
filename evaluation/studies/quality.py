"""What a format of the CPU tier changes in what a model predicts and answers, measured on this machine."""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import torch
from matplotlib.figure import Figure
from rich.console import Console

import pacpu
from evaluation.options import File, Folder, RunOptions, experiment_settings
from evaluation.plots.charts import LinePanel, Series, line_figure
from evaluation.plots.style import FigureText, system_colour
from evaluation.results.folder import FlatRecord
from evaluation.results.paths import model_folder
from evaluation.results.progress import TokenProgress
from evaluation.results.provenance import OtherWork, model_identity
from evaluation.run import Point, PointResult, identity
from evaluation.study import Rows, Study, Table, command
from pacpu import int8, rows
from swiftllm.config import EngineConfig
from swiftllm.core.sampling_params import SamplingParams
from swiftllm.device import open_device
from swiftllm.llm import LLM
from swiftllm.model.config.model_config import ModelConfig
from swiftllm.model.folder.tokenizer import Tokenizer
from swiftllm.model.llama import LlamaModel
from swiftllm.model.stages.loaded_weights import open_weights
from swiftllm.model.stages.placement import all_resident
from swiftllm.runtime.attention_choices import use_fastest_attention
from swiftllm.runtime.processors import ExecutionContext

NAME = "quality"


@dataclass(frozen=True)
class Options(RunOptions):
    """Perplexity, KL divergence and greedy answers with the CPU tier in eight bits beside the exact one, all decodes on
    the CPU.

    Formats and sizes come from configs/experiments/quality.yaml. Results, figure and provenance go to
    results/quality/<run>/ and results/quality-answers/<run>/. Running the same command again continues an interrupted
    run. With the default model on two cores it takes about 20 minutes.
    """

    model: Folder = None
    """Hugging Face folder of the model; by default the one of `make setup`."""
    text: File = None
    """Text to predict, UTF-8; by default the English one of Python's own help."""


# -- the text whose tokens are predicted ------------------------------------------------------------------------------

DEFAULT_TEXT = "Python's language reference (pydoc_data.topics)"


@dataclass(frozen=True)
class Text:
    """A text, its name, and a digest of it."""

    name: str
    content: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.content.encode()).hexdigest()[:16]


def read_text(path: Path | None) -> Text:
    """The text of a file, by default the topics of Python's own help, in English.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if path is not None:
        return Text(path.name, path.read_text(encoding="utf-8"))
    from pydoc_data.topics import topics

    return Text(DEFAULT_TEXT, "\n".join(topics[name] for name in sorted(topics)))


def token_sequences(text: Text, model: Path, number: int, length: int) -> list[list[int]]:
    """So many stretches of the text that do not overlap, ``length`` tokens each, spread evenly over it.

    Raises:
        ValueError: the model folder has no tokenizer, or the text is too short.
    """
    tokenizer = Tokenizer.from_folder(model)
    if tokenizer is None:
        raise ValueError(f"{model} has no tokenizer")
    tokens = tokenizer.encode(text.content, add_special_tokens=False)
    if len(tokens) < number * length:
        raise ValueError(
            f"{text.name} has {len(tokens)} tokens, and {number} sequences of {length} need {number * length}: "
            "give a longer --text"
        )
    stride = len(tokens) // number
    return [tokens[i * stride : i * stride + length] for i in range(number)]


# -- formats, each as what one layer's decode attention makes of it ---------------------------------------------------

EXACT, FORMATS = "exact", ("exact", "exact-rotated", "int8", "int8-rotated")
BLOCK_SIZE = 16


def hadamard(size: int) -> torch.Tensor:
    """The orthonormal Hadamard matrix, float32 ``[size, size]``; it is its own inverse.

    Raises:
        ValueError: the size is no power of two.
    """
    if size < 1 or size & (size - 1):
        raise ValueError(f"a Hadamard rotation needs a head size that is a power of two, not {size}")
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix * size**-0.5


class TierCache:
    """The K and V of one layer in a format: ``exact`` or ``int8``, and either ``-rotated``.

    Rotated: Q, K and V are multiplied with a Hadamard matrix before, the output after. It leaves products of Q and K as
    they are and spreads channels that are larger than others. ``exact-rotated`` shows what rounding alone changes.
    """

    def __init__(self, name: str, num_rows: int, num_tokens: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
        """Room for ``num_tokens`` of each of ``num_rows`` requests; ``heads``: KV heads and the size of a head.

        Raises:
            ValueError: there is no such format, or none for this head size.
        """
        if name not in FORMATS:
            raise ValueError(f"format {name!r} must be one of {', '.join(FORMATS)}")
        num_kv_heads, head_dim = heads
        self.scale, self._rotation = head_dim**-0.5, hadamard(head_dim).to(dtype) if name.endswith("-rotated") else None
        blocks_each = -(-num_tokens // BLOCK_SIZE)
        self._tables = torch.arange(num_rows * blocks_each, dtype=torch.int32).view(num_rows, blocks_each)
        shape = (num_rows * blocks_each, num_kv_heads)
        if name.startswith(EXACT):
            self.content = torch.zeros(*shape, 2, BLOCK_SIZE, head_dim, dtype=dtype)
        else:
            self.content = torch.zeros(*shape, int8.head_bytes(BLOCK_SIZE, head_dim), dtype=torch.uint8)

    def attend(self, qkv: Sequence[torch.Tensor], context_len: int, num_threads: int) -> torch.Tensor:
        """Store the new token of every row and attend over ``context_len`` tokens, it included.

        ``qkv``: ``[rows, heads, head_dim]`` each. Returns the output in the shape of q.
        """
        q, k, v = (part if self._rotation is None else part @ self._rotation for part in qkv)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lens = torch.full((len(q),), context_len, dtype=torch.int32)
        pacpu.paged_attention(
            q, k, v, self.content, self._tables, lens, out, self.scale, num_threads=num_threads, kernel="native"
        )
        return out if self._rotation is None else out @ self._rotation

    def become(self, exact: TierCache) -> None:
        """Take over the content of an exact cache of the same size."""
        blocks, content = torch.arange(len(exact.content)), exact.content
        if self._rotation is not None:
            content = content @ self._rotation
        rows.scatter_blocks(content[None], self.content[None], blocks)


# -- predictions: a text, token by token, with both formats in step ---------------------------------------------------


@dataclass(frozen=True)
class ScoreTask:
    """``sequences`` of the text in one batch, ``length`` tokens each. ``text``: a file, None for the default one."""

    model: Path
    format: str
    sequences: int
    length: int
    text: Path | None = None


@dataclass
class Sums:
    """Over all predicted tokens."""

    tokens: int = 0
    exact_nll: float = 0.0
    nll: float = 0.0
    divergence: float = 0.0
    equal_top: int = 0

    def add(self, exact: torch.Tensor, other: torch.Tensor, next_tokens: torch.Tensor) -> None:
        """Log-probabilities ``[rows, vocab_size]`` by both formats, and the tokens that follow."""
        self.tokens += len(next_tokens)
        self.exact_nll -= exact.gather(1, next_tokens[:, None]).sum(dtype=torch.float64).item()
        self.nll -= other.gather(1, next_tokens[:, None]).sum(dtype=torch.float64).item()
        self.divergence += (exact.exp() * (exact - other)).sum(dtype=torch.float64).item()
        self.equal_top += int((exact.argmax(1) == other.argmax(1)).sum())

    def values(self) -> dict[str, float]:
        perplexity, exact = (torch.tensor(nll / self.tokens).exp().item() for nll in (self.nll, self.exact_nll))
        return {
            "tokens": self.tokens,
            "perplexity_exact": exact,
            "perplexity": perplexity,
            "perplexity_over_exact": perplexity / exact,
            "kl_divergence": self.divergence / self.tokens,
            "equal_top": self.equal_top / self.tokens,
        }

    def __iadd__(self, more: Sums) -> Self:
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(more, item.name))
        return self


class TwoFormats:
    """A model on the CPU with two caches of each layer: an exact one, and one of a format.

    Attributes:
        caches: by layer, both caches.
        last: by layer, q, k and v of the last token in the exact rows.
    """

    def __init__(self, task: ScoreTask) -> None:
        """
        Raises:
            FileNotFoundError, ValueError: the model folder is incomplete or of an unsupported kind, or the format is.
        """
        use_fastest_attention()
        hardware, config = open_device("cpu"), EngineConfig(str(task.model), device="cpu")
        self._processors = processors = ExecutionContext(config, hardware)
        model = ModelConfig.from_folder(task.model)
        self.dtype = processors.dtype
        weights = open_weights(
            config, model, self.dtype, processors.ops, all_resident(model.num_layers), hardware, processors.host_ops
        )
        self.model = LlamaModel(model, weights, processors.ops, task.length)
        size = task.sequences, task.length, (model.num_kv_heads, model.head_dim), self.dtype
        self.caches = [(TierCache(EXACT, *size), TierCache(task.format, *size)) for _ in range(model.num_layers)]
        self.last: list[list[torch.Tensor]] = []

    @property
    def threads(self) -> int:
        return self._processors.cores.gpu_batch_threads

    @torch.inference_mode()
    def step(self, tokens: torch.Tensor, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode ``tokens`` int64 ``[rows]`` at ``position`` in both formats. Returns log-probabilities of the next
        tokens, float32 ``[rows, vocab_size]`` each."""
        model, self.last = self.model, []
        residual = model.embed(tokens.repeat(2))
        rotary_rows = model.rotary_table[position].expand(len(residual), -1, -1).contiguous()
        qkv = model.first_stage(residual, rotary_rows)
        for layer in range(model.config.num_layers):
            attention_out = self._attend(layer, qkv, position + 1)
            if layer + 1 < model.config.num_layers:
                qkv = model.stage(layer, attention_out, residual, rotary_rows)
        logits = model.last_stage(attention_out, residual)
        exact, other = (part.float().log_softmax(-1) for part in logits.chunk(2))
        return exact, other

    def _attend(self, layer: int, qkv: torch.Tensor, context_len: int) -> torch.Tensor:
        halves = [self.model.split_qkv(half) for half in qkv.chunk(2)]
        self.last.append([part.clone() for part in halves[0]])
        outs = [
            cache.attend(half, context_len, self.threads)
            for cache, half in zip(self.caches[layer], halves, strict=True)
        ]
        return torch.cat(outs)

    @torch.inference_mode()
    def worst_head_errors(self, context_len: int) -> list[float]:
        """By layer: the relative error of the attention output of the worst query head, for the last token's queries
        over the exact rows' K and V, which are brought into the format."""
        errors = []
        for (exact, other), qkv in zip(self.caches, self.last, strict=True):
            other.become(exact)
            outs = [cache.attend(qkv, context_len, self.threads).double() for cache in (exact, other)]
            error = (outs[1] - outs[0]).norm(dim=(0, 2)) / outs[0].norm(dim=(0, 2))
            errors.append(error.max().item())
        return errors


def score(task: ScoreTask, progress: Callable[[int], None] = lambda steps: None) -> dict[str, Any]:
    """What :class:`Sums` has, ``kl_up_to_N`` of contexts up to N tokens, and ``worst_head_error_layer_N``.

    ``progress`` is told of steps done, ``task.length - 1`` in the end.

    Raises:
        ValueError: the text is too short, or the format does not fit the model.
    """
    text = read_text(task.text)
    tokens = torch.tensor(token_sequences(text, task.model, task.sequences, task.length))
    both, of_all, of_bins = TwoFormats(task), Sums(), {end: Sums() for end in ends_of_bins(task.length - 1)}
    for position in range(task.length - 1):
        end = next(end for end in of_bins if position < end)
        of_bins[end].add(*both.step(tokens[:, position], position), tokens[:, position + 1])
        progress(position + 1)
    for sums in of_bins.values():
        of_all += sums
    errors = both.worst_head_errors(task.length - 1)
    return {
        **of_all.values(),
        **{f"kl_up_to_{end}": sums.divergence / sums.tokens for end, sums in of_bins.items()},
        **{f"worst_head_error_layer_{layer}": error for layer, error in enumerate(errors)},
        "text": text.name,
        "text_digest": text.digest,
        "dtype": str(both.dtype).removeprefix("torch."),
    }


def ends_of_bins(length: int) -> list[int]:
    """``length`` and its halves, down to 32 tokens, in ascending order."""
    ends = [length]
    while ends[0] >= 64:
        ends.insert(0, ends[0] // 2)
    return ends


# -- answers of an engine, all decodes on the CPU: greedy texts, and a needle -----------------------------------------

SYSTEM = "fastdecode"
"""Decodes all requests on the CPU."""
NEEDLE, QUESTION = "\nThe pass key is {key}. Remember it.\n", "\nThe pass key is"


@dataclass(frozen=True)
class AnswerTask:
    """Numbers of requests and lengths in tokens. A needle stands at each of ``depths`` places of its context."""

    model: Path
    cpu_kv_dtype: str
    prompts: int
    prompt_len: int
    output_len: int
    depths: int
    context_len: int
    text: Path | None = None


def answer_both(task: AnswerTask) -> dict[str, Any]:
    """What an engine with the exact tier and one with the other format answer, compared.

    ``equal_outputs``: share of greedy outputs that are the same; ``first_difference``: mean position of the first token
    that differs, the length where none does; ``needles_found`` and ``needles_found_exact``: of ``needles``.

    Raises:
        ValueError: the text is too short, or the format does not fit the model.
    """
    text, tokenizer = read_text(task.text), Tokenizer.from_folder(task.model)
    prompts = token_sequences(text, task.model, task.prompts, task.prompt_len)
    keys, haystacks = needles(task, tokenizer, token_sequences(text, task.model, task.depths, task.context_len))
    outputs, found = {}, {}
    for cpu_kv_dtype in ("auto", task.cpu_kv_dtype):
        with LLM(task.model, SYSTEM, device="cpu", cpu_kv_dtype=cpu_kv_dtype) as llm:
            greedy = SamplingParams(temperature=0.0, max_tokens=task.output_len, ignore_eos=True)
            outputs[cpu_kv_dtype] = [list(output.token_ids) for output in llm.generate(prompts, greedy)]
            answers = llm.generate(haystacks, replace(greedy, max_tokens=8))
            found[cpu_kv_dtype] = sum(key in output.text for key, output in zip(keys, answers, strict=True))
    firsts = [first_difference(*pair) for pair in zip(*outputs.values(), strict=True)]
    return {
        "outputs": len(firsts),
        "equal_outputs": sum(first == task.output_len for first in firsts) / len(firsts),
        "first_difference": sum(firsts) / len(firsts),
        "needles": len(keys),
        "needles_found_exact": found["auto"],
        "needles_found": found[task.cpu_kv_dtype],
        "text": text.name,
        "text_digest": text.digest,
    }


def needles(task: AnswerTask, tokenizer: Tokenizer, contexts: Sequence[list[int]]) -> tuple[list[str], list[list[int]]]:
    """Keys of five digits, and contexts that hold them, each at another depth, and end in the question."""
    chooser, keys, haystacks = random.Random(0), [], []
    question = tokenizer.encode(QUESTION, add_special_tokens=False)
    for place, context in enumerate(contexts):
        keys.append(str(chooser.randrange(10_000, 100_000)))
        needle = tokenizer.encode(NEEDLE.format(key=keys[-1]), add_special_tokens=False)
        kept = context[: task.context_len - len(needle) - len(question)]
        at = round(place / max(1, len(contexts) - 1) * len(kept))
        haystacks.append([*kept[:at], *needle, *kept[at:], *question])
    return keys, haystacks


def first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    """The first position where two equally long outputs differ; their length where they do not."""
    pairs = itertools.chain(zip(left, right, strict=True), [(None, 0)])
    return next(i for i, (a, b) in enumerate(pairs) if a != b)


# -- points -----------------------------------------------------------------------------------------------------------


def points_of(name: str, task: type[ScoreTask | AnswerTask], field: str, options: Options) -> list[Point]:
    """A point for each format that a section of the experiment file lists under ``field``.

    Raises:
        ValueError: there is no model, or the list is empty; the message says what to do.
    """
    section = experiment_settings(NAME, options.config)[name]
    if not section[field]:
        raise ValueError(f"the experiment file lists no {field}: name one or more")
    folder = model_folder(options.model)
    tasks = [task(folder, **{**section, field: format_name}, text=options.text) for format_name in section[field]]
    return [Point(it, it, it, made) for it, made in zip(section[field], tasks, strict=True)]


def describe(points: Sequence[Point]) -> dict[str, Any]:
    """What decides the numbers of the points."""
    task = points[0].task
    return {"measured": identity(points), "model": model_identity(task.model), "text": read_text(task.text).digest}


def run_scores(point: Point, label: str, console: Console) -> PointResult:
    """Predict the text in a format and exactly."""
    task: ScoreTask = point.task
    with TokenProgress(label, task.sequences * (task.length - 1), console) as progress:
        return _result(point, lambda: score(task, lambda steps: progress.update(task.sequences * steps)))


def run_answers(point: Point, label: str, console: Console) -> PointResult:
    """Answer with the tier in a format and exact."""
    return _result(point, lambda: answer_both(point.task))


def _result(point: Point, measure: Callable[[], Mapping[str, Any]]) -> PointResult:
    others = OtherWork()
    values = measure()
    known = {"system": point.key, "backend": "torch-cpu", "model": point.task.model.name}
    return PointResult({**known, **values, "others_busy_cores": others.busy_cores()}, ())


# -- tables and figure ------------------------------------------------------------------------------------------------

COLOURS = dict(
    zip(("exact-rotated", "int8", "int8-rotated"), map(system_colour, ("swiftllm", "neo", "apex")), strict=True)
)
NOTES = (
    "Every token is a decode that attends to a tier in the format; the exact tier is predicted beside it. Rotated: Q, "
    "K and V times a Hadamard matrix. exact-rotated shows what rounding to the model's dtype alone changes."
)


def by_number(row: FlatRecord, prefix: str) -> list[tuple[float, float]]:
    """The values of the fields that begin so, by the number at their end."""
    return sorted((int(name.removeprefix(prefix)), value) for name, value in row.items() if name.startswith(prefix))


def with_worst_head(rows: Rows) -> list[FlatRecord]:
    return [
        {**row, "worst_head_error": max(error for _, error in by_number(row, "worst_head_error_layer_"))}
        for row in rows
    ]


def measured_of(rows: Rows) -> str:
    return f"MEASURED: {rows[0]['model']} in {rows[0]['dtype']} on {rows[0]['text']}, all decodes on the CPU tier"


def draw_scores(rows: Rows) -> Figure:
    """What is predicted, over the context, and what attention computes, over the layers."""

    def panel(title: str, x_label: str, y_label: str, prefix: str, times: int, **options: bool) -> LinePanel:
        lines = [
            Series(row["system"], COLOURS[row["system"]], [(x, times * y) for x, y in by_number(row, prefix)])
            for row in rows
        ]
        return LinePanel(title, x_label, y_label, lines, **options)

    panels = [
        panel(
            "What is predicted",
            "context (tokens, at most)",
            "KL from exact (0.001 nats)",
            "kl_up_to_",
            1000,
            log_x=True,
        ),
        panel("What attention computes", "layer", "worst head's error (%)", "worst_head_error_layer_", 100),
    ]
    first = rows[0]
    subtitle = f"{first['model']} in {first['dtype']}, {first['tokens']:,} tokens of {first['text']}, measured"
    text = FigureText("A CPU tier in eight bits beside an exact one", subtitle, NOTES)
    return line_figure(panels, text)


PARTS = {
    "scores": Study(
        NAME,
        points=functools.partial(points_of, "scores", ScoreTask, "format"),
        run_point=run_scores,
        describe=describe,
        tables=[
            Table(
                (
                    ("format", "system", "s"), ("tokens", "tokens", ",d"), ("perplexity", "perplexity", ".3f"),
                    ("exact", "perplexity_exact", ".3f"), ("/ exact", "perplexity_over_exact", ".4f"),
                    ("KL divergence", "kl_divergence", ".5f"), ("equal top token", "equal_top", ".2%"),
                    ("worst head's error", "worst_head_error", ".1%"),
                ),
                measured_of,
                lines=with_worst_head,
            )
        ],
        figure=lambda run: draw_scores(run.summary),
    ),
    "answers": Study(
        f"{NAME}-answers",
        points=functools.partial(points_of, "answers", AnswerTask, "cpu_kv_dtype"),
        run_point=run_answers,
        describe=describe,
        tables=[
            Table(
                (
                    ("format", "system", "s"), ("outputs", "outputs", "d"), ("equal", "equal_outputs", ".0%"),
                    ("first difference", "first_difference", ".0f"), ("needles", "needles", "d"),
                    ("found", "needles_found", "d"), ("exact", "needles_found_exact", "d"),
                ),
                "MEASURED: greedy answers of an engine whose CPU tier has the format, and of one with the exact tier\n"
                "first difference: mean position in the output; needles: a key at several depths of a long context",
            )
        ],
    ),
}  # fmt: skip
main = command(Options, PARTS)
