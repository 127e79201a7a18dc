"""Rotary position embedding: the angle table, with the frequency scalings of the Llama family."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope"]
ROPE_KINDS: tuple[RopeKind, ...] = get_args(RopeKind)
FIELDS = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
    *("low_freq_factor", "high_freq_factor", "max_position_embeddings"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"),
    *("short_factor", "long_factor"),
}
"""Of ``rope_parameters``, those that are read and those that transformers does not read either."""


class UnsupportedRope(ValueError):
    """A rotary embedding that there is no code for."""


@dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies of a longer context derive from those the model was first trained with.

    ``linear`` divides all by ``factor``. ``llama3`` (Llama 3.1) divides the slow ones, whose wavelength exceeds
    ``original_max_position / low_freq_factor`` tokens, keeps the fast ones, whose wavelength is below
    ``original_max_position / high_freq_factor``, and blends in between.
    ``yarn`` (arXiv 2309.00071) divides the pairs behind the one that turns ``low_freq_factor`` times within
    ``original_max_position`` tokens, keeps those before the one that turns ``high_freq_factor`` times, and blends in
    between by the number of the pair; then it multiplies all rotated elements by ``amplitude``.
    ``longrope`` (arXiv 2402.13753) divides each pair by its own factor, and multiplies as ``yarn`` does. It has one
    list of factors for texts within ``original_max_position`` tokens, and one for longer texts.
    """

    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    amplitude: float = 1.0
    whole_pairs: bool = True
    """Whether the bounds of ``yarn`` are rounded to whole pairs."""
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    @classmethod
    def from_config(cls, parameters: Mapping[str, Any], kinds: tuple[RopeKind, ...] = ROPE_KINDS) -> RopeScaling:
        """Read ``rope_scaling`` or ``rope_parameters`` of a config.json, of one of ``kinds``; empty means no scaling.

        Raises:
            UnsupportedRope: an unknown kind or field.
            ValueError: a field of the kind is missing.
        """
        kind = parameters.get("rope_type") or parameters.get("type") or "default"
        if kind not in kinds:
            raise UnsupportedRope(f"rope scaling {kind!r} is not supported; supported are {', '.join(kinds)}")
        for name, value in parameters.items():
            if name not in FIELDS and value not in (None, False):
                what = f"{name}={value!r} of the rotary embedding is not supported"
                raise UnsupportedRope(f"{what}; supported is one of the kinds {', '.join(kinds)} for all layers")
        if parameters.get("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedRope("partial_rotary_factor is not supported: rotary positions turn whole heads")
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
            if kind == "yarn":
                return cls(
                    "yarn",
                    float(parameters["factor"]),
                    float(parameters.get("beta_slow") or 1.0),
                    float(parameters.get("beta_fast") or 32.0),
                    int(parameters["original_max_position_embeddings"]),
                    _yarn_amplitude(parameters),
                    bool(parameters.get("truncate", True)),
                )
            if kind == "longrope":
                factors = (tuple(map(float, parameters[name])) for name in ("short_factor", "long_factor"))
                original = int(parameters["original_max_position_embeddings"])
                growth = float(parameters.get("factor") or parameters["max_position_embeddings"] / original)
                amplitude = parameters.get("attention_factor")
                if amplitude is None:
                    amplitude = math.sqrt(1 + math.log(max(1.0, growth)) / math.log(original))
                return cls("longrope", growth, 1.0, 4.0, original, float(amplitude), True, *factors)
        except KeyError as error:
            raise ValueError(f"rope scaling {kind!r} lacks the field {error}") from None
        return cls()

    def positions(self, told: int) -> int:
        """Tokens of the longest request of a model whose ``max_position_embeddings`` are ``told``, as in vLLM: linear
        scaling multiplies them, and yarn those of the first training. The other kinds tell the product."""
        if self.kind == "linear":
            return int(told * self.factor)
        return int(self.original_max_position * self.factor) if self.kind == "yarn" else told


def _yarn_amplitude(parameters: Mapping[str, Any]) -> float:
    """What ``attention_factor`` says, or what follows from the other fields."""
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    growth = math.log(max(1.0, float(parameters["factor"]))) / 10
    scale, scale_of_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if scale and scale_of_all:
        return (float(scale) * growth + 1) / (float(scale_of_all) * growth + 1)
    return growth + 1


def inverse_frequencies(rotary_dim: int, theta: float, scaling: RopeScaling, longest: int = 1) -> torch.Tensor:
    """Radians per token of each rotated pair, float32 ``[rotary_dim / 2]``. ``longest``: tokens of a text at most."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    frequencies = 1.0 / theta**exponents
    if scaling.kind == "default":
        return frequencies
    if scaling.kind == "longrope":
        is_long = longest > scaling.original_max_position
        return frequencies / torch.tensor(scaling.long_factors if is_long else scaling.short_factors)
    scaled = frequencies / scaling.factor
    if scaling.kind == "linear":
        return scaled
    if scaling.kind == "yarn":
        kept = _kept_by_yarn(rotary_dim, theta, scaling)
    else:
        # The number of turns a pair makes within the original context decides. Between the two bounds the kept share
        # of the unscaled frequency grows linearly from 0 to 1.
        turns = scaling.original_max_position * frequencies / (2 * math.pi)
        kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        kept = kept.clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * scaled


def _kept_by_yarn(rotary_dim: int, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """The kept share of each pair's unscaled frequency."""

    def pair_with(turns: float) -> float:
        """The number of the pair, in general no whole one, that makes so many turns within the original context."""
        wavelength = scaling.original_max_position / turns
        return rotary_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_with(scaling.high_freq_factor), pair_with(scaling.low_freq_factor)
    if scaling.whole_pairs:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    width = last - first or 0.001
    return 1.0 - ((torch.arange(rotary_dim // 2, dtype=torch.float32) - first) / width).clamp(0.0, 1.0)


def rotary_order(head_dim: int, rotary_dim: int, is_interleaved: bool) -> torch.Tensor | None:
    """Where each element of a head comes from, int64 ``[head_dim]``, so that :func:`rotary_table` turns it; None: all
    stay.

    In the checkpoint the first ``rotary_dim`` elements turn: neighbours together if ``is_interleaved``, otherwise the
    two halves of them.
    """
    turned, rest = torch.arange(rotary_dim), torch.arange(rotary_dim, head_dim)
    first, second = turned.view(-1, 2).t() if is_interleaved else turned.view(2, -1)
    order = torch.cat((first, rest[: len(rest) // 2], second, rest[len(rest) // 2 :]))
    return None if torch.equal(order, torch.arange(head_dim)) else order


def rotary_table(
    num_positions: int,
    head_dim: int,
    theta: float,
    scaling: RopeScaling,
    rotary_dim: int | None = None,
    score_multiplier: float = 1.0,
) -> torch.Tensor:
    """Cosines and signed sines, float32 ``[num_positions, 2, head_dim]``.

    Element j and element j + head_dim/2 of a head turn together by angle ``position * frequency_j``, so with
    ``x'`` the head with its two halves exchanged, rotation is ``x * table[p, 0] + x' * table[p, 1]``: the sine
    carries a minus sign in the first half. Pairs from ``rotary_dim / 2`` on, by default none, do not turn.
    Scores of rotated queries and keys are multiplied by ``score_multiplier``.
    """
    rotary_dim = rotary_dim or head_dim
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rotary_dim, theta, scaling, num_positions))
    cos, sin = (part * scaling.amplitude for part in (angles.cos(), angles.sin()))
    if rotary_dim < head_dim:
        rest = angles.new_zeros(num_positions, (head_dim - rotary_dim) // 2)
        cos, sin = torch.cat((cos, rest + 1), -1), torch.cat((sin, rest), -1)
    table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1)
    return table if score_multiplier == 1.0 else table * math.sqrt(score_multiplier)
