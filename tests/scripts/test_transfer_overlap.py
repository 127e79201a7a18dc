"""The benchmark of copies between the tiers before and beside the layers: its pieces, its waits and what it writes."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

import benchmarks.bench_transfer_overlap as bench
import swiftllm.runtime.kv_transfers
from apex.cli.parser import parse_options
from evaluation.results.rows import SIMULATED, kind_of
from swiftllm.core.plan import Swap
from swiftllm.core.request import Request, Tier
from swiftllm.core.sampling_params import SamplingParams
from swiftllm.device.host import HostDevice
from swiftllm.kv.budget import KVPlan
from swiftllm.kv.format import KVFormat
from swiftllm.kv.pools import KVPools
from swiftllm.ops.interface import Ops
from swiftllm.runtime.kv_transfers import KVTransfers


class Tickets:
    """A CPU tier that only remembers the bytes of each read."""

    may_die = False

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def read(self, read, send_back):
        self.sizes.append(read.out.nbytes)


@pytest.mark.parametrize("chunk_bytes", [1, 3000, 10_000, 1 << 20])
@pytest.mark.parametrize(("num_blocks", "num_layers"), [(1, 4), (7, 3), (12, 5)])
def test_a_swap_is_divided_as_the_engine_divides_it(monkeypatch, num_blocks, num_layers, chunk_bytes):
    for module in (bench, swiftllm.runtime.kv_transfers):
        monkeypatch.setattr(module, "CHUNK_BYTES", chunk_bytes)
    model = SimpleNamespace(num_layers=num_layers, windows=None, num_kv_heads=2, head_dim=8)
    block_bytes = num_layers * 2 * 2 * 16 * 8 * 2
    plan = KVPlan(dict.fromkeys(Tier, num_blocks), 16, dict.fromkeys(Tier, block_bytes))
    pools = KVPools(model, plan, HostDevice.torch_device, dict.fromkeys(Tier, KVFormat.exact(torch.float16)))
    tier, blocks = Tickets(), tuple(range(num_blocks))
    request = Request("r", (0,), SamplingParams(max_tokens=1))
    KVTransfers(HostDevice(), pools, Ops(), tier).swap_blocks([Swap(request, Tier.CPU, blocks, blocks)])
    assert tier.sizes == list(bench.pieces(num_blocks, num_layers, block_bytes))
    assert sum(tier.sizes) == num_blocks * block_bytes


def test_the_host_launches_pieces_and_waits_for_what_pinned_memory_does_not_hold(monkeypatch):
    monkeypatch.setattr(bench, "MAX_STAGED_BYTES", 40)
    assert bench.launched_s([10] * 4, 5.0, 8.0, 0.25) == 6.0, "all of them fit"
    # A piece takes 2 s of the link. When the tenth is launched, six of them have arrived: the first after 2.25 s.
    assert bench.launched_s([10] * 10, 0.0, 20.0, 0.25) == 6 * 2.0 + 0.25
    # The host is slower than the link, so nothing waits.
    assert bench.launched_s([10] * 10, 0.0, 20.0, 3.0) == 30.0


def test_what_is_written_says_that_it_is_simulated(tmp_path, capsys):
    arguments = ["--results-dir", str(tmp_path), "--pcie-shares", "1", "0.5"]
    assert bench.main(parse_options(bench.Options, arguments=arguments)) == 0
    folder = tmp_path / "bench_transfer_overlap" / "latest"
    assert "SIMULATED" in capsys.readouterr().out
    for name in ("summary.md", "timelines.csv"):
        assert "SIMULATED" in (folder / name).read_text().splitlines()[0]
    records = json.loads((folder / "summary.json").read_text())
    assert len(records) == 16 and {kind_of(record) for record in records} == {SIMULATED}
    for record in records:
        assert 0.0 <= record["after_ms"] < record["before_ms"], record["copied"]
        if "chunk" in record["copied"]:  # before, a layer's copy was in series with it
            copy_ms = record["copied_mib"] * 2**20 / record["pcie_gb_s"] / 1e6
            assert record["before_ms"] == pytest.approx(copy_ms, rel=0.01)
    lines = (folder / "timelines.csv").read_text().splitlines()[2:]
    assert len(lines) == 16 * 3 * 33
