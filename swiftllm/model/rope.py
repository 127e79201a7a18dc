"""Rotary position embedding: the angle table, with the frequency scalings of the Llama family."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

RopeKind = Literal["default", "linear", "llama3"]
ROPE_KINDS: tuple[RopeKind, ...] = get_args(RopeKind)
FIELDS = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
    *("low_freq_factor", "high_freq_factor", "max_position_embeddings"),
}
"""Of ``rope_parameters``, those that are read and those that transformers does not read either."""


@dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies of a longer context derive from those the model was first trained with.

    ``linear`` divides all by ``factor``. ``llama3`` (Llama 3.1) divides the slow ones, whose wavelength exceeds
    ``original_max_position / low_freq_factor`` tokens, keeps the fast ones, whose wavelength is below
    ``original_max_position / high_freq_factor``, and blends in between.
    """

    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    @classmethod
    def from_config(cls, parameters: Mapping[str, Any], kinds: tuple[RopeKind, ...] = ROPE_KINDS) -> RopeScaling:
        """Read ``rope_scaling`` or ``rope_parameters`` of a config.json, of one of ``kinds``; empty means no scaling.

        Raises:
            ValueError: an unknown kind or field, or a field of the kind is missing.
        """
        kind = parameters.get("rope_type") or parameters.get("type") or "default"
        if kind not in kinds:
            raise ValueError(f"rope scaling {kind!r} is not supported; supported are {', '.join(kinds)}")
        for name, value in parameters.items():
            if name not in FIELDS and value not in (None, False):
                raise ValueError(f"{name}={value!r} of the rotary embedding is not supported")
        if parameters.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError("partial_rotary_factor is not supported: rotary positions turn whole heads")
        try:
            if kind == "linear":
                return cls("linear", float(parameters["factor"]))
            if kind == "llama3":
                return cls(
                    "llama3",
                    float(parameters["factor"]),
                    float(parameters["low_freq_factor"]),
                    float(parameters["high_freq_factor"]),
                    int(parameters["original_max_position_embeddings"]),
                )
        except KeyError as error:
            raise ValueError(f"rope scaling {kind!r} lacks the field {error}") from None
        return cls()


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """Radians per token of each rotated pair, float32 ``[head_dim / 2]``."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / theta**exponents
    if scaling.kind == "default":
        return frequencies
    scaled = frequencies / scaling.factor
    if scaling.kind == "linear":
        return scaled
    # The number of turns a pair makes within the original context decides. Between the two bounds the kept share of
    # the unscaled frequency grows linearly from 0 to 1.
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * scaled


def rotary_table(num_positions: int, head_dim: int, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """Cosines and signed sines, float32 ``[num_positions, 2, head_dim]``.

    Element j and element j + head_dim/2 of a head turn together by angle ``position * frequency_j``, so with
    ``x'`` the head with its two halves exchanged, rotation is ``x * table[p, 0] + x' * table[p, 1]``: the sine
    carries a minus sign in the first half.
    """
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(head_dim, theta, scaling))
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1)
