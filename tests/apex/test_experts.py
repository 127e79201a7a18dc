"""Models with experts: their tokens are those of transformers, whatever the system."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from quantise import write_folder
from safetensors.torch import load_file, save_file

from apex.build import build_system
from swiftllm.model.checkpoint import WeightsError
from swiftllm.model.config import ModelConfig
from swiftllm.model.placement import Place
from swiftllm.model.weights import load_weights
from swiftllm.ops import matrices
from tests.apex.placement.placements import give_times
from tests.apex.placement.test_measured import config_for
from tests.apex.rank_group import Group
from tests.apex.rank_group import run as run_engine
from tests.apex.test_end_to_end import OVERLAP, VARIANTS, judge, serve
from tests.reference.fake_engine import flat_table
from tests.reference.fake_gpu import fake_gpu
from tests.reference.tiny_experts import KINDS, make_tiny_experts, stack_experts
from tests.swiftllm.runtime.test_graphs import admit, decode_items, make_driver
from tests.swiftllm.runtime.test_streams import serve as serve_on_gpu

POOLS = {"num_gpu_blocks": 12, "num_cpu_blocks": 80}
TOKENS = 8


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, tuple[Path, list, list]]:
    """Folders, prompts, and what transformers makes of them."""
    draw, made = random.Random(5), {}
    for name in KINDS:
        folder = make_tiny_experts(tmp_path_factory.mktemp("experts"), name)
        prompts = [[draw.randrange(3, 128) for _ in range(draw.choice([1, 17, 40, 60]))] for _ in range(7)]
        made[name] = folder, prompts, judge(folder, prompts, TOKENS)
    return made


def test_tokens_are_those_of_transformers_under_every_system(models) -> None:
    """In pools so small that requests are preempted and swapped, filled with NaN."""
    names = [*KINDS, *["Qwen3Moe"] * (len(VARIANTS) - len(KINDS))]
    for name, variant in zip(names, VARIANTS, strict=True):
        folder, prompts, expected = models[name]
        tokens, _ = serve(folder, variant, prompts, TOKENS, **POOLS)
        assert tokens == expected, (name, variant)


def test_graphs_and_placed_weights_give_the_tokens_of_a_host(models) -> None:
    """With less memory than the weights take, stages are streamed, or computed by the CPU."""
    for name in ("Qwen3Moe", "Mixtral"):
        folder, prompts, _ = models[name]
        placed = ((2.5, {Place.STREAMED}), (1.5, {Place.CPU})) if name == "Mixtral" else ()
        for stages, places in ((9.0, set()), *placed):
            config = replace(config_for(folder, stages), max_model_len=128)
            some = prompts[:3]
            expected = serve_on_gpu(build_system("swiftllm", replace(config, weights_gpu_memory=None)), some)
            with pytest.MonkeyPatch.context() as patch, fake_gpu(1):
                slow = {"cpu": 100.0, "stream": 1e-3} if places == {Place.STREAMED} else {"cpu": 1e-3, "stream": 100.0}
                if places:
                    give_times(patch, gpu=1e-3, **slow)
                engine = build_system("apex", config, OVERLAP, profile=flat_table(cpu_token_s=2e-6))
                assert set(engine.backend.placement.places) == {Place.RESIDENT, *places}
                assert len(engine.backend.graphs) > 0
                assert serve_on_gpu(engine, some) == expected


def test_padding_of_graphs_goes_to_no_expert(models) -> None:
    """Its residual stays as it is. Experts whose weights are read for padding alone would cost as much as others."""
    with fake_gpu(2):
        driver = make_driver(models["Mixtral"][0])
        requests = admit(driver, (5, 9, 7))
        driver.prefill(requests)
        backend, frame = driver.backend, driver.backend.graphs._gpu_batches
        gpu_batch = backend.open_gpu_batch(decode_items(requests))
        backend.run_stage(-1, [gpu_batch])
        backend.gpu_attention(0, gpu_batch)
        frame.attention_out[3:] = 0.0
        before = frame.residual[:4].clone()
        backend.run_stage(0, [gpu_batch])
        torch.cuda.synchronize()
        changed = (frame.residual[:4] != before).any(1)
        assert changed.tolist() == [True, True, True, False]


def test_so_are_those_of_two_ranks_which_divide_each_expert(models) -> None:
    group = Group(models["Qwen3Moe"][0], 2)
    for variant in ("vllm", "neo", "apex-overlap"):
        engine = group.engine(variant)
        requests = group.add(engine)
        run_engine(engine)
        group.check(requests)
    group.close()


def test_planted_faults_change_the_tokens(models, monkeypatch) -> None:
    def tokens(name: str) -> list:
        folder, prompts, _ = models[name]
        return serve(folder, "vllm", prompts, TOKENS, num_gpu_blocks=80, num_cpu_blocks=0)[0]

    choose, exchange = matrices.choose_experts, matrices.ExpertWeights._part

    def after_top_k(logits, per_token, normalises):
        ids, _ = choose(logits, per_token, normalises)
        return ids, logits.gather(1, ids).softmax(-1)

    def exchanged(self, stack, bias, expert):
        part, own = exchange(self, stack, bias, expert)
        return part.roll(len(part) // 2, 0) if stack is self.gate_up else part, own

    faults = {
        ("Qwen3Moe normalising", "choose_experts"): lambda logits, k, _: choose(logits, k, False),
        ("Mixtral", "choose_experts"): lambda logits, k, _: choose(logits, k, False),
        ("Qwen3Moe", "choose_experts"): after_top_k,
        ("Qwen3Moe", "ExpertWeights._part"): exchanged,
    }
    for (name, where), fault in faults.items():
        assert tokens(name) == models[name][2]
        with monkeypatch.context() as patch:
            patch.setattr(f"swiftllm.ops.matrices.{where}", fault)
            assert tokens(name) != models[name][2], where


def test_a_stack_is_read_as_its_experts_and_what_cannot_be_read_is_refused(models, tmp_path) -> None:
    folder = make_tiny_experts(tmp_path, "Qwen3Moe")
    config = ModelConfig.from_folder(folder)
    apart = load_weights(folder, config, "cpu", torch.float32).layers
    stack_experts(folder)
    raw = json.loads((folder / "config.json").read_text())
    raw["num_experts"] = raw.pop("num_local_experts")  # as on the hub
    (folder / "config.json").write_text(json.dumps(raw))
    assert ModelConfig.from_folder(folder) == config
    for layer, other in zip(apart, load_weights(folder, config, "cpu", torch.float32).layers, strict=True):
        assert torch.equal(layer.gate_up, other.gate_up) and torch.equal(layer.down, other.down)
        assert torch.equal(layer.router, other.router)

    for more, words in (
        ({"mlp_only_layers": [1]}, "some layers only"),
        ({"decoder_sparse_step": 2}, "some layers only"),
        ({"num_experts_per_tok": 9}, "9 of 8 experts"),
        ({"num_shared_experts": 2}, "num_shared_experts=2 in Qwen3MoeForCausalLM is not supported"),
    ):
        (folder / "config.json").write_text(json.dumps(raw | more))
        with pytest.raises(ValueError, match=words):
            ModelConfig.from_folder(folder)
    with pytest.raises(WeightsError, match=r"experts\.down_proj has shape \[8, 64, 32\], .* asks for \[8, 64, 24\]"):
        load_weights(folder, replace(config, intermediate_size=24), "cpu", torch.float32)


def test_4_bit_experts_give_the_tokens_of_the_dequantised_ones(models, tmp_path) -> None:
    """Tensor by tensor they come quantised; what kernels for stacks cannot read is refused in a sentence."""
    for name in ("Qwen3Moe", "Mixtral"):
        folder, prompts, _ = models[name]
        for layout in ("awq", "gptq", "dequantised"):
            write_folder(folder, tmp_path / f"{name} {layout}", layout, 32)
        expected = judge(tmp_path / f"{name} dequantised", prompts, TOKENS)
        for layout, variant in (("awq", "vllm"), ("gptq", "apex-overlap")):
            assert serve(tmp_path / f"{name} {layout}", variant, prompts, TOKENS, **POOLS)[0] == expected, layout
    write_folder(folder, tmp_path / "ordered", "gptq", 32, act_order=True)
    with pytest.raises(ValueError, match="act-order"):
        serve(tmp_path / "ordered", "vllm", prompts, TOKENS, **POOLS)

    file = tmp_path / "Qwen3Moe awq" / "model.safetensors"
    tensors = load_file(file)
    gate = tensors.pop("model.layers.0.mlp.gate.weight")
    save_file(tensors | {"model.layers.0.mlp.gate.qweight": gate.int()}, file)
    with pytest.raises(WeightsError, match=r"layers\.0\.mlp\.gate\.qweight: routers that are quantised are not supp"):
        serve(file.parent, "vllm", prompts, TOKENS, **POOLS)
