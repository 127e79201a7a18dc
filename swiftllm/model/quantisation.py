"""How a checkpoint's matrices are quantised, from its ``quantization_config``; other schemes are refused here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swiftllm.model.folder import is_there, read_object, tell
from swiftllm.ops.matrices import CODES_PER_WORD, GROUP_MULTIPLE, MXFP4_GROUP

AWQ, GPTQ, COMPRESSED_TENSORS, MXFP4 = "AWQ", "GPTQ", "compressed-tensors", "MXFP4"
SUPPORTED = (
    "supported are 4-bit AWQ (gemm), GPTQ (with or without act-order) and compressed-tensors (pack-quantized), for "
    "gpt-oss MXFP4 in place of these, and 16 or 32 bits: take another checkpoint of the model"
)
OLD_GPTQ_FILE = "quantize_config.json"  # beside a config.json that says nothing


@dataclass(frozen=True)
class QuantisationScheme:
    """What all quantised matrices of a checkpoint have in common."""

    method: str
    """One of ``AWQ``, ``GPTQ``, ``COMPRESSED_TENSORS`` and ``MXFP4``."""
    group_size: int | None
    """Inputs that share a scale; None: all inputs of an output do."""
    ordered: bool = False
    """Whether groups hold inputs in an order of their own (act-order)."""
    symmetric: bool = False
    """Whether every zero point is 8."""
    zero_offset: int = 0
    """What the checkpoint says is to be added to a stored zero point: 1 in GPTQ's first version."""
    parts: int = 1
    """Ranks among which the inputs of ``o`` and ``down`` are divided."""

    @classmethod
    def from_config(cls, raw: Mapping[str, Any], folder: Path) -> QuantisationScheme | None:
        """The scheme that a folder's ``config.json`` names; None: the weights are not quantised.

        Raises:
            ValueError: the scheme is not supported; the message says what is not, and what would do.
        """
        given = raw.get("quantization_config")
        if given is None and is_there(folder / OLD_GPTQ_FILE):
            given = {"quant_method": "gptq", **read_object(folder / OLD_GPTQ_FILE)}
        if given is None:
            return None
        readers = {"awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed_tensors, "mxfp4": _mxfp4}
        if not isinstance(given, Mapping):
            raise _refusal(folder, f"quantization_config={given!r}")
        method = given.get("quant_method")
        if method not in readers:
            raise _refusal(folder, f"quant_method={method!r}")
        if method == COMPRESSED_TENSORS and given.get("kv_cache_scheme"):
            tell(f"{folder}: kv_cache_scheme of quantization_config is not followed: the cache has a format of its own")
            if not given.get("config_groups"):
                return None  # nothing else is quantised
        try:
            scheme = readers[method](given)
            is_head_left_out = any("lm_head" in module for module in given.get("ignore") or ())
            if scheme.method == COMPRESSED_TENSORS and not (is_head_left_out or raw.get("tie_word_embeddings")):
                raise _Unsupported("a quantised lm_head")
        except _Unsupported as what:
            raise _refusal(folder, str(what)) from None
        if scheme.group_size is not None and (scheme.group_size < 1 or scheme.group_size % GROUP_MULTIPLE):
            raise _refusal(folder, f"group_size={scheme.group_size} (no multiple of {GROUP_MULTIPLE})")
        return scheme

    @property
    def experts_only(self) -> bool:
        """Whether attention's matrices are not quantised."""
        return self.method == MXFP4

    def group_size_of(self, in_features: int) -> int:
        """Inputs that share a scale in a matrix of so many inputs.

        Raises:
            ValueError: groups do not divide the inputs.
        """
        group_size = self.group_size or in_features
        if in_features % group_size:
            raise ValueError(
                f"groups of {group_size} do not divide {in_features} inputs: take a checkpoint with groups of 64 or 32"
            )
        return group_size

    def can_be_divided(self, heads: int, kv_heads: int, ffn: int) -> bool:
        """Whether matrices may be cut to so many outputs of Q, outputs of K and V, and rows of the FFN.

        The first and the last are inputs of other matrices too, and groups of these must stay whole. With act-order
        or one group no rank has whole groups.
        """
        if self.experts_only and self.group_size is not None:  # MXFP4, whose groups are of 32
            return ffn % self.group_size == 0
        unit = CODES_PER_WORD if self.ordered else self.group_size or GROUP_MULTIPLE
        return heads % unit == 0 and ffn % unit == 0 and kv_heads % CODES_PER_WORD == 0

    def describe(self) -> str:
        """For people: ``4-bit GPTQ, groups of 128, act-order``."""
        groups = f"groups of {self.group_size}" if self.group_size else "one group"
        return f"4-bit {self.method}, {groups}{', act-order' if self.ordered else ''}"


class _Unsupported(Exception):
    """What a checkpoint asks for that there is no reader for."""


def _refusal(folder: Path, what: str) -> ValueError:
    return ValueError(f"{folder}: quantised weights with {what} are not supported; {SUPPORTED}")


def _require(given: Mapping[str, Any], name: str, *wanted: Any, default: Any = None) -> None:
    value = given.get(name, default)
    if (value.lower() if isinstance(value, str) else value) not in wanted:
        raise _Unsupported(f"{name}={value!r}")


def _group_size(value: Any) -> int | None:
    return None if value in (None, -1) else int(value)


def _awq(given: Mapping[str, Any]) -> QuantisationScheme:
    _require(given, "bits", 4)
    _require(given, "version", "gemm", default="gemm")
    return QuantisationScheme(AWQ, _group_size(given.get("group_size", 128)))


def _gptq(given: Mapping[str, Any]) -> QuantisationScheme:
    _require(given, "bits", 4)
    _require(given, "checkpoint_format", "gptq", "gptq_v2", default="gptq")
    _require(given, "lm_head", False, default=False)
    if given.get("dynamic"):
        raise _Unsupported("dynamic (a scheme for each module)")
    return QuantisationScheme(
        GPTQ,
        _group_size(given.get("group_size", 128)),
        ordered=bool(given.get("desc_act", False)),
        symmetric=bool(given.get("sym", True)),
        zero_offset=0 if given.get("checkpoint_format") == "gptq_v2" else 1,
    )


def _compressed_tensors(given: Mapping[str, Any]) -> QuantisationScheme:
    _require(given, "format", "pack-quantized")
    for name in ("transform_config", "sparsity_config"):
        if given.get(name):
            raise _Unsupported(name)
    groups = list(given.get("config_groups", {}).values())
    if len(groups) != 1:
        raise _Unsupported(f"{len(groups)} config_groups")
    (group,) = groups
    _require(group, "format", None, "pack-quantized")
    _require(group, "input_activations", None)
    _require(group, "output_activations", None)
    _require(group, "targets", ["Linear"])
    weights = group.get("weights") or {}
    _require(weights, "num_bits", 4)
    _require(weights, "type", "int", default="int")
    _require(weights, "strategy", "group", "channel")
    _require(weights, "actorder", None, False, True, "weight", "static", "group", "dynamic")
    _require(weights, "dynamic", False, default=False)
    return QuantisationScheme(
        COMPRESSED_TENSORS,
        _group_size(weights.get("group_size")) if weights["strategy"] == "group" else None,
        ordered=weights.get("actorder") in ("group", "dynamic", True),
        symmetric=bool(weights.get("symmetric", True)),
    )


def _mxfp4(given: Mapping[str, Any]) -> QuantisationScheme:
    """Attention, routers, embedding and vocabulary are not quantised, as in all checkpoints of gpt-oss."""
    for pattern in given.get("modules_to_not_convert") or ():
        if not pattern.endswith((".self_attn", ".mlp.router", "embed_tokens", "lm_head")):
            raise _Unsupported(f"modules_to_not_convert={pattern!r}")
    return QuantisationScheme(MXFP4, MXFP4_GROUP)
