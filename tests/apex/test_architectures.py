"""The architectures beside Llama in whole engines: greedy tokens are those of transformers (float32)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path

import pytest
import torch
from quantise import write_folder
from transformers import PreTrainedModel

from swiftllm.config import EngineConfig
from swiftllm.model.placement import Place, Placement
from swiftllm.runtime.torch_backend import open_torch_backend
from tests.apex.rank_group import TOKENS, Group, run
from tests.apex.test_end_to_end import VARIANTS, serve
from tests.reference.backend_driver import tokens_of_both_tiers
from tests.reference.fake_gpu import fake_gpu
from tests.reference.tiny_architectures import ARCHITECTURES, make_tiny, tiny_judge
from tests.swiftllm.remote.test_tokens import MAX_TOKENS, tokens_beside_a_host

SMALL = {"block_size": 4, "num_gpu_blocks": 24, "num_cpu_blocks": 400}
EACH = 2
"""Systems and strategies that an architecture runs under: others than its neighbours."""


def greedy(model: PreTrainedModel, prompts: Sequence[list[int]], max_tokens: int) -> list[tuple[int, ...]]:
    outputs = []
    for prompt in prompts:
        how = {"max_new_tokens": max_tokens, "do_sample": False, "eos_token_id": 2, "pad_token_id": 2}
        with torch.inference_mode():
            tokens = model.generate(input_ids=torch.tensor([prompt]), **how)
        outputs.append(tuple(tokens[0, len(prompt) :].tolist()))
    return outputs


def some_prompts(count: int) -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(3, 100) for _ in range(draw.choice([1, 9, 30, 50]))] for _ in range(count)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = ARCHITECTURES.keys() - {"Ministral3 alone", "Phi3 whole", "Granite untied"}
    return {name: make_tiny(tmp_path_factory.mktemp("tiny"), name, eos_token_id=2) for name in sorted(names)}


def test_tokens_equal_transformers_under_every_system(folders) -> None:
    """In pools so small that requests are preempted and swapped, with CPU batches under way; NaN where nobody wrote."""
    variants, prompts = cycle(VARIANTS), some_prompts(6)
    on_cpu = 0
    for name, folder in folders.items():
        expected = greedy(tiny_judge(folder, name), prompts, 7)
        for variant in islice(variants, EACH):
            tokens, stats = serve(folder, variant, prompts, 7, **SMALL)
            assert tokens == expected, (name, variant)
            on_cpu += stats.cpu_busy_s > 0
    assert on_cpu > len(folders)


def test_longer_requests_have_the_long_factors_of_longrope(folders) -> None:
    """From their first token on, if they are asked for."""
    prompts = [random.Random(7).choices(range(3, 100), k=300)]
    expected = greedy(tiny_judge(folders["Phi3 long"], ""), prompts, 8)
    pools = {"num_gpu_blocks": 30, "num_cpu_blocks": 30, "max_model_len": 512}
    for variant in ("vllm", "fastdecode"):
        assert serve(folders["Phi3 long"], variant, prompts, 8, **pools)[0] == expected, variant


def test_tokens_of_4_bits_and_of_two_ranks_equal_transformers(folders, tmp_path) -> None:
    """On the dequantised weights: all that is folded, in 4 bits and divided."""
    for name, layout in (("Glm4", "awq"), ("Phi3", "gptq"), ("Granite", "compressed-tensors")):
        source = make_tiny(tmp_path / name, name, intermediate_size=128, eos_token_id=2)
        packed, dense = tmp_path / f"{name} packed", tmp_path / f"{name} dense"
        write_folder(source, packed, layout, 32)
        write_folder(source, dense, "dequantised", 32)
        expected = greedy(tiny_judge(dense, name), some_prompts(5), TOKENS)
        assert serve(packed, "apex-overlap", some_prompts(5), TOKENS, **SMALL)[0] == expected, name
        if name == "Glm4":
            group = Group(packed, 2, judged_by=dense)
            engine = group.engine("apex")
            requests = group.add(engine)
            run(engine)
            group.check(requests)
            group.close()


def test_an_attention_host_changes_no_token(folders, monkeypatch) -> None:
    """Its cache holds permuted rows of K."""
    expected = greedy(tiny_judge(folders["Glm4"], "Glm4"), some_prompts(8), MAX_TOKENS)
    assert tokens_beside_a_host(folders["Glm4"], some_prompts(8), monkeypatch) == expected


def test_neither_graphs_nor_placed_weights_change_a_token(folders) -> None:
    """On a made-up GPU: norms of outputs, layers without rotary positions, permuted rows and factors."""
    placed = Placement((Place.STREAMED, Place.CPU, Place.RESIDENT, Place.STREAMED))
    sizes = {"num_gpu_blocks": 16, "num_cpu_blocks": 16, "max_num_seqs": 4, "max_model_len": 64}

    def tokens(folder: Path, placement: Placement | None = None) -> list[list[int]]:
        config = EngineConfig(str(folder), dtype="float32", **sizes)
        return tokens_of_both_tiers(open_torch_backend(config, placement=placement), range(3, 12), 5, 4)

    for name in ("Glm4", "SmolLM3", "Granite"):
        expected = tokens(folders[name])
        for placement in (None, placed) if name == "Glm4" else (placed,):
            with fake_gpu(0) as cuda:
                assert tokens(folders[name], placement) == expected, (name, placement)
            assert cuda.replays
