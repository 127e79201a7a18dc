"""A profile in which every time is linear in its size: simple enough to write closed forms with."""

from __future__ import annotations

from apex.perf.model import Curve, ProfileTable, Surface

LAYERS = 16
ENDS_S = 8e-4


def linear_s(rows: float) -> float:
    return 1e-3 + 2e-7 * rows


def flat_ends_table(gpu_token_s: float, cpu_token_s: float, cpu_start_s: float = 2e-5) -> ProfileTable:
    """Laws simple enough to write closed forms with: everything is linear in its size."""

    def over_context(start_s: float, token_s: float) -> Surface:
        curves = [Curve((0, 1000), (start_s, start_s + n * 1000 * token_s)) for n in (1, 1001)]
        return Surface((1, 1001), tuple(curves))

    return ProfileTable(
        identity={},
        linear=Curve((1, 1001), (linear_s(1), linear_s(1001))),
        ends=Curve((1, 2), (ENDS_S, ENDS_S)),
        swap=Curve((0, 100), (1e-4, 2.1e-3)),
        prefill_attention=Surface((1, 2), (Curve((0, 1000), (1e-6, 1e-6)), Curve((0, 1000), (2e-6, 2e-6)))),
        gpu_attention=over_context(1e-5, gpu_token_s),
        cpu_attention=over_context(cpu_start_s, cpu_token_s),
    )
