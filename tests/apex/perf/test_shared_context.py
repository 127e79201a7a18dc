"""CPU attention of rows that share blocks, by hand."""

from dataclasses import replace

import pytest

from apex.perf.model import PerfModel, SharedContext, saved_tokens
from apex.simulator.links import RemoteHosts, SeveralHostsModel
from swiftllm.core.request import Tier
from tests.reference.linear_profile import flat_ends_table

ALONE = flat_ends_table(1e-6, 1e-6, cpu_start_s=0.0)
"""A microsecond for each token of a row's context."""
SHARING = replace(ALONE, shared_row_cost=0.25, rows_per_read=4.0)


def test_a_read_serves_several_rows_and_a_further_row_costs_its_arithmetic():
    # Nine rows in reads of four are three reads, so six further rows, which save three quarters of 1,000 tokens each.
    nine = SharedContext(rows=9, tokens=1000)
    assert saved_tokens([nine], row_cost=0.25, rows_per_read=4) == 4500
    assert saved_tokens([nine, SharedContext(2, 160)], row_cost=0.25, rows_per_read=4) == 4500 + 120
    assert saved_tokens([nine], row_cost=1.0, rows_per_read=4) == 0
    assert saved_tokens([nine], row_cost=0.25, rows_per_read=1) == 0


def test_shared_tokens_take_less_time():
    model = PerfModel(SHARING, 2)
    rows, tokens = 9, 9 * 1100
    assert model.cpu_attention_s(rows, tokens) == pytest.approx(9900e-6)
    assert model.cpu_attention_s(rows, tokens, [SharedContext(9, 1000)]) == pytest.approx(5400e-6)
    as_ever = PerfModel(ALONE, 2)  # a machine on which sharing does not pay
    assert as_ever.cpu_attention_s(rows, tokens, [SharedContext(9, 1000)]) == pytest.approx(9900e-6)


def test_several_hosts_save_what_one_does():
    class EmptyTier:
        def capacity(self, tier: Tier) -> int:
            return 100

        num_free = capacity

    several = SeveralHostsModel(SHARING, 2, RemoteHosts(1, 1e9, 0.0, 1), EmptyTier())
    assert several.cpu_attention_s(9, 9900, [SharedContext(9, 1000)]) == pytest.approx(5400e-6)
