"""How a format of the CPU tier changes what a model predicts: a text, token by token, with both formats in step.

Every token is a decode that attends to the tier, so all K and V that it reads went through the format. Rows of the
exact format and of the other one share the linear layers; their attention is computed apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import torch

from evaluation.experiments.quality.formats import EXACT, TierCache
from evaluation.experiments.quality.text import read_text, token_sequences
from swiftllm.config import EngineConfig
from swiftllm.device import open_device
from swiftllm.model.config import ModelConfig
from swiftllm.model.llama import LlamaModel
from swiftllm.model.placement import all_resident
from swiftllm.model.stages import open_weights
from swiftllm.runtime.cpu_tuning import use_fastest_attention
from swiftllm.runtime.execution_context import ExecutionContext


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
