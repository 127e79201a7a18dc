"""gpt-oss in whole engines: greedy tokens are those of transformers (float32)."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

import pytest

from swiftllm.config import EngineConfig
from swiftllm.model.placement import Place, Placement
from swiftllm.ops.cpu import CpuOps
from swiftllm.runtime import torch_backend
from swiftllm.runtime.cpu_tier import AttentionTask
from swiftllm.runtime.torch_backend import open_torch_backend
from tests.apex.rank_group import Group, run
from tests.apex.test_architectures import greedy, some_prompts
from tests.apex.test_end_to_end import VARIANTS, serve
from tests.reference.backend_driver import tokens_of_both_tiers
from tests.reference.fake_gpu import fake_gpu
from tests.reference.tiny_architectures import tiny_judge
from tests.reference.tiny_gpt_oss import make_folders
from tests.swiftllm.remote.test_tokens import MAX_TOKENS, tokens_beside_a_host

POOLS = {"block_size": 4, "num_gpu_blocks": 40, "num_cpu_blocks": 400}
TOKENS = 7
PROMPTS = some_prompts(6)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_folders(tmp_path_factory.mktemp("gpt-oss"))


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, list[tuple[int, ...]]]:
    tokens = {name: greedy(tiny_judge(folders[name], ""), PROMPTS, TOKENS) for name in ("plain", "dense")}
    return tokens | {"packed": tokens["dense"]}


def test_tokens_equal_transformers_under_every_system(folders, expected) -> None:
    """In pools so small that requests are preempted and swapped, with CPU batches under way; NaN where nobody wrote."""
    on_cpu = 0
    for name, variant in zip(cycle(("plain", "packed")), VARIANTS, strict=False):
        tokens, stats = serve(folders[name], variant, PROMPTS, TOKENS, **POOLS)
        assert tokens == expected[name], (name, variant)
        on_cpu += stats.cpu_busy_s > 0
    assert on_cpu > 4


def test_so_do_those_of_two_ranks(folders) -> None:
    """Sinks by heads; biases of outputs are added once."""
    for name, judge, variant in (("plain", "plain", "vllm"), ("packed", "dense", "apex-overlap")):
        group = Group(folders[name], 2, judged_by=folders[judge])
        engine = group.engine(variant)
        requests = group.add(engine)
        run(engine)
        group.check(requests)
        group.close()


def test_an_attention_host_changes_no_token(folders, monkeypatch) -> None:
    expected = greedy(tiny_judge(folders["plain"], ""), PROMPTS, MAX_TOKENS)
    assert tokens_beside_a_host(folders["plain"], PROMPTS, monkeypatch) == expected


def test_neither_graphs_nor_placed_weights_change_a_token(folders) -> None:
    """On a made-up GPU: experts with biases are streamed, and computed by the CPU."""
    placed = Placement((Place.STREAMED, Place.CPU, Place.RESIDENT, Place.STREAMED, Place.RESIDENT))
    sizes = {"num_gpu_blocks": 32, "num_cpu_blocks": 32, "max_num_seqs": 4, "max_model_len": 64}

    def tokens(folder: Path, placement: Placement | None = None) -> list[list[int]]:
        config = EngineConfig(str(folder), dtype="float32", **sizes)
        return tokens_of_both_tiers(open_torch_backend(config, placement=placement), range(3, 15), 5, 4)

    for name, placement in (("plain", None), ("packed", placed)):
        expected = tokens(folders[name])
        with fake_gpu(0) as cuda:
            assert tokens(folders[name], placement) == expected, (name, placement)
        assert cuda.replays


def test_sinks_are_needed_wherever_there_is_attention(folders, expected, monkeypatch) -> None:
    def tokens(variant: str) -> list[tuple[int, ...]]:
        return serve(folders["plain"], variant, PROMPTS, TOKENS, **POOLS)[0]

    attention = {name: getattr(CpuOps, name) for name in ("decode_attention", "prefill_attention")}
    for name, attend in attention.items():
        with monkeypatch.context() as patch:
            patch.setattr(CpuOps, name, lambda *given, attend=attend: attend(*given[:-1]))
            assert tokens("vllm") != expected["plain"], name
    with monkeypatch.context() as patch:
        patch.setattr(torch_backend, "AttentionTask", lambda *given: AttentionTask(*given[:4]))
        assert tokens("fastdecode") != expected["plain"]
