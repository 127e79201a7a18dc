"""A checkpoint's tensors as Llama's: fused modules part by part, outputs in the order and with the factors that the
operations expect."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from swiftllm.model.config.model_config import ModelConfig
from swiftllm.model.config.rope import rotary_order
from swiftllm.model.folder.checkpoint import StoredTensor, WeightsError
from swiftllm.model.weights.quantised.readers import IN, OUT, Axis, StoredMatrix, divisible_axes
from swiftllm.ops.quantised_matrix import MXFP4_GROUP

TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "language_model.": "model.",
}
BARE = ("layers.", "embed_tokens.", "norm.")  # how names begin in a checkpoint of the model without its vocabulary
EXPERT_NAMES = {"block_sparse_moe": "mlp", "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj", "router": "gate"}
STACK = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(?:_(bias|blocks|scales))?")
EVERY_OTHER = slice(0, None, 2), slice(1, None, 2)
IMAGE_PREFIXES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
ROTATED = ("q_proj", "k_proj", "q_norm", "k_norm")
TO_RESIDUAL = ("o_proj", "down_proj")
FINAL_NORM = "model.norm.weight"
EMBEDDING_NAME, HEAD_NAME = "model.embed_tokens.weight", "lm_head.weight"

Rows = TypeVar("Rows", torch.Tensor, StoredMatrix)


def fused_modules(config: ModelConfig) -> Mapping[str, Mapping[str, int]]:
    """Modules of a checkpoint that hold the outputs of several of ours, one after the other, and how many of each."""
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    ffn = config.intermediate_size
    return {
        "qkv_proj": {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size},
        "gate_up_proj": {"gate_proj": ffn, "up_proj": ffn},
    }


def as_llama(config: ModelConfig, tensors: Iterable[tuple[str, StoredTensor]]) -> Iterator[tuple[str, StoredTensor]]:
    """The ``tensors`` of a checkpoint with the names that Llama's have; ``config`` is that of the whole model. A matrix
    that is tied has the embedding's, whatever a checkpoint calls it.

    Raises:
        WeightsError: a tensor cannot be split.
    """
    axes: dict[str, tuple[Axis, ...]] = {"weight": (OUT, IN), "bias": (OUT,)}
    if config.quantisation is not None:
        axes |= divisible_axes(config.quantisation)
    fused = fused_modules(config)
    for name, stored in tensors:
        if config.is_wrapped:
            if name.startswith(IMAGE_PREFIXES):
                continue
            prefix = next((prefix for prefix in TEXT_PREFIXES if name.startswith(prefix)), "")
            name = TEXT_PREFIXES.get(prefix, "") + name.removeprefix(prefix)
        name = f"model.{name}" if name.startswith(BARE) else name
        if name == HEAD_NAME and config.tie_word_embeddings:
            name = EMBEDDING_NAME
        if config.experts is not None:
            name = ".".join(EXPERT_NAMES.get(word, word) for word in name.split("."))
            if ".mlp.gate." in name and not name.endswith((".gate.weight", ".gate.bias")):
                raise WeightsError(f"{name}: routers that are quantised are not supported")
            if (stack := STACK.fullmatch(name)) is not None:
                block, module, kind = stack.groups()
                yield from _experts_of(block, module, kind, stored, config)
                continue
        place, _, kind = name.rpartition(".")
        block, _, module = place.rpartition(".")
        parts = fused.get(module)
        if parts is None or kind not in axes:
            yield name, stored
            continue
        first, total = 0, sum(parts.values())
        for part, size in parts.items():
            own = stored
            if OUT in axes[kind]:
                axis = axes[kind].index(OUT)
                count = stored.get_shape()[axis]
                start, stop = (count * output // total for output in (first, first + size))
                if start * total != count * first or stop * total != count * (first + size):
                    raise WeightsError(f"{name} has shape {stored.get_shape()}, which has no part {part}")
                own = _Part(stored, axis, range(start, stop))
            yield f"{block}.{part}.{kind}", own
            first += size


def _experts_of(
    block: str, module: str, kind: str | None, stored: StoredTensor, config: ModelConfig
) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors in a stack ``[num_experts, out, in]``, ``[num_experts, out]`` or of MXFP4. Gate is above up, but in
    gpt-oss their outputs alternate.

    Raises:
        WeightsError: it has another shape.
    """
    assert config.experts is not None
    hidden, ffn, experts = config.hidden_size, config.intermediate_size, config.experts.num_experts
    alternates, of_expert = config.has_swiglu_limit, {"down_proj": range(hidden)}
    outputs, inputs = hidden, ffn
    if module == "gate_up_proj":
        outputs, inputs = 2 * ffn, hidden
        of_gate, of_up = EVERY_OTHER if alternates else (slice(0, ffn), slice(ffn, None))
        of_expert = {"gate_proj": range(outputs)[of_gate], "up_proj": range(outputs)[of_up]}
    is_transposed = alternates and kind is None
    shapes = {
        None: [inputs, outputs] if is_transposed else [outputs, inputs],
        "bias": [outputs],
        "blocks": [outputs, inputs // MXFP4_GROUP, MXFP4_GROUP // 2],
        "scales": [outputs, inputs // MXFP4_GROUP],
    }
    shape = [experts, *shapes[kind]]
    if stored.get_shape() != shape:
        stack = f"{block}.{module}" + (f"_{kind}" if kind else "")
        raise WeightsError(f"{stack} has shape {stored.get_shape()}, config.json asks for {shape}")
    for expert in range(experts):
        own: StoredTensor = _OfExpert(stored, expert)
        for part, wanted in of_expert.items():
            rows = _Part(_Transposed(own) if is_transposed else own, 0, wanted)
            yield f"{block}.{expert}.{part}.{kind or 'weight'}", rows


@dataclass(frozen=True)
class _OfExpert:
    """A matrix of a stored stack."""

    stored: StoredTensor
    expert: int

    def get_shape(self) -> list[int]:
        return list(self.stored.get_shape()[1:])

    def get_dtype(self) -> str:
        return self.stored.get_dtype()

    def __getitem__(self, slices: tuple[slice, ...]) -> torch.Tensor:
        return self.stored[(slice(self.expert, self.expert + 1), *slices)][0]


@dataclass(frozen=True)
class _Transposed:
    """A stored matrix ``[in, out]`` as ``[out, in]``."""

    stored: StoredTensor

    def get_shape(self) -> list[int]:
        return self.stored.get_shape()[::-1]

    def get_dtype(self) -> str:
        return self.stored.get_dtype()

    def __getitem__(self, slices: tuple[slice, ...]) -> torch.Tensor:
        rows, columns = (*slices, slice(None))[:2]
        return self.stored[columns, rows].t()


@dataclass(frozen=True)
class _Part:
    """Some rows or columns of a stored tensor; those in between may be of another part."""

    stored: StoredTensor
    axis: int
    wanted: range

    def get_shape(self) -> list[int]:
        shape = list(self.stored.get_shape())
        shape[self.axis] = len(self.wanted)
        return shape

    def get_dtype(self) -> str:
        return self.stored.get_dtype()

    def __getitem__(self, slices: tuple[slice, ...]) -> torch.Tensor:
        whole = [*slices, *[slice(None)] * (self.axis + 1 - len(slices))]
        own = self.wanted[whole[self.axis]]
        whole[self.axis] = slice(own.start, own.stop, own.step)
        return self.stored[tuple(whole)]


class Folding:
    """What of a model is done to its tensors when they are read."""

    def __init__(self, config: ModelConfig) -> None:
        self._order = rotary_order(config.head_dim, config.rotary_dim or config.head_dim, config.interleaved_rotary)
        self._residual_scale = config.residual_scale
        self._logits_multiplier = config.logits_multiplier

    def rows(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Rows of tensor ``name``: whole heads of those that turn."""
        module = name.rsplit(".", 2)[-2]
        if name == FINAL_NORM and self._logits_multiplier != 1.0:
            rows = rows.float() * self._logits_multiplier
        return self._fold(module, rows)

    def matrix(self, module: str, matrix: torch.Tensor | StoredMatrix) -> torch.Tensor | StoredMatrix:
        """The same for a matrix that may be quantised."""
        return self._fold(module.rpartition(".")[-1], matrix)

    def _fold(self, module: str, rows: Rows) -> Rows:
        if module in ROTATED and self._order is not None:
            if isinstance(rows, StoredMatrix):
                return rows.with_heads_ordered(self._order)
            return rows.unflatten(0, (-1, len(self._order)))[:, self._order.to(rows.device)].flatten(0, 1)
        if module in TO_RESIDUAL and self._residual_scale != 1.0:
            return rows.scaled(self._residual_scale) if isinstance(rows, StoredMatrix) else rows * self._residual_scale
        return rows
