"""Models whose numbers are beyond those of float16, as those of models trained in bfloat16 are (QwenLM/Qwen3 #761)."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from swiftllm.config import EngineConfig
from swiftllm.model.placement import Place, Placement
from swiftllm.runtime.execution_context import FLOAT16_RESIDUAL_SCALE
from swiftllm.runtime.torch_backend import open_torch_backend
from swiftllm.sampling.sampler import LogitsNotFinite
from tests.apex.rank_group import TOKENS, Group, run
from tests.apex.test_architectures import greedy, some_prompts
from tests.apex.test_end_to_end import VARIANTS, serve
from tests.reference.backend_driver import tokens_of_both_tiers
from tests.reference.fake_gpu import fake_gpu
from tests.reference.tiny_architectures import tiny_judge
from tests.reference.tiny_experts import make_tiny_experts
from tests.reference.wide_residuals import TO_RESIDUAL, make_wide

LARGEST = torch.finfo(torch.float16).max
PROMPTS = some_prompts(3)
POOLS = {"block_size": 4, "num_gpu_blocks": 40, "num_cpu_blocks": 40}
SMALL_POOLS = {"block_size": 4, "num_gpu_blocks": 20, "num_cpu_blocks": 40}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wide(tmp_path_factory.mktemp("wide"))


def largest_numbers(judge: PreTrainedModel) -> tuple[float, float]:
    """Of the residuals behind the first layer, and of what layers add to them."""
    residuals, addends = [], []
    for layer in judge.model.layers:
        layer.register_forward_hook(lambda module, given, made: residuals.append(made.abs().max().item()))
        for module in (layer.self_attn.o_proj, layer.mlp.down_proj):
            module.register_forward_hook(lambda module, given, made: addends.append(made.abs().max().item()))
    for prompt in PROMPTS:
        with torch.inference_mode():
            judge(torch.tensor([prompt]))
    return max(residuals), max(addends)


def test_residuals_beyond_float16_are_added_in_float32_under_every_system(wide: Path) -> None:
    judge = tiny_judge(wide, "")
    expected = greedy(judge, PROMPTS, 8)
    assert largest_numbers(judge)[0] > 1.3 * LARGEST
    for variant in VARIANTS:
        pools = POOLS if variant == "vllm" else SMALL_POOLS
        assert serve(wide, variant, PROMPTS, 8, dtype="float16", **pools)[0] == expected, variant


@pytest.mark.parametrize("can_capture", [False, True])
@pytest.mark.parametrize("variant", ["swiftllm", "neo", "fastdecode", "apex-overlap", "apex-overlap-synchronous"])
def test_so_they_are_on_a_made_up_t4(wide: Path, variant: str, can_capture: bool) -> None:
    expected = greedy(tiny_judge(wide, ""), PROMPTS, 8)
    with fake_gpu(1 + can_capture, can_capture=can_capture, capability=75) as cuda:
        assert serve(wide, variant, PROMPTS, 8, dtype="float16", **SMALL_POOLS)[0] == expected
    assert bool(cuda.replays) == can_capture


def test_so_they_are_with_weights_that_are_streamed_or_the_cpus(wide: Path) -> None:
    sizes = {"num_gpu_blocks": 32, "num_cpu_blocks": 32, "max_num_seqs": 4, "max_model_len": 64}

    def tokens(dtype: str, *places: Place) -> list[list[int]]:
        placement = Placement(places, embedding_on_host=True) if places else None
        config = EngineConfig(str(wide), dtype=dtype, **sizes)
        return tokens_of_both_tiers(open_torch_backend(config, placement=placement), PROMPTS[1], 5, 6)

    expected = tokens("float32")
    for seed, places in enumerate(((Place.STREAMED, Place.CPU, Place.RESIDENT, Place.STREAMED), (Place.CPU,) * 4)):
        with fake_gpu(seed, can_capture=not seed, capability=75):
            assert tokens("float16", *places) == expected


def test_so_they_are_by_two_ranks(wide: Path) -> None:
    """What ranks add up are products, in float16."""
    group = Group(wide, 2, dtype="float16")
    group.prompts, group.expected = PROMPTS, greedy(tiny_judge(wide, ""), PROMPTS, TOKENS)
    engine = group.engine("apex-overlap")
    requests = group.add(engine)
    run(engine)
    group.check(requests)
    group.close()


def test_so_they_are_beside_experts(tmp_path: Path) -> None:
    model = make_wide(tmp_path, make=partial(make_tiny_experts, name="Qwen3Moe"), seed=26)
    judge = tiny_judge(model, "")
    expected = greedy(judge, PROMPTS, 6)
    judge.model.layers[-1].register_forward_hook(lambda module, given, made: largest.append(made.abs().max().item()))
    largest: list[float] = []
    with torch.inference_mode():
        for prompt in PROMPTS:
            judge(torch.tensor([prompt]))
    assert max(largest) > LARGEST
    assert serve(model, "apex-overlap", PROMPTS, 6, dtype="float16", **SMALL_POOLS)[0] == expected
    with fake_gpu(2, capability=75):
        assert serve(model, "apex-overlap", PROMPTS, 6, dtype="float16", **SMALL_POOLS)[0] == expected


@pytest.mark.parametrize("system", ["swiftllm", "apex"])
def test_a_product_beyond_float16_ends_its_request_with_an_error_that_names_the_dtype(
    tmp_path: Path, system: str
) -> None:
    """Neither residuals in float32 nor the scale of what is added to them help there."""
    model = make_wide(tmp_path, 2.0**22, names=TO_RESIDUAL[1:])
    judge = tiny_judge(model, "")
    expected = greedy(judge, PROMPTS, 4)
    assert largest_numbers(judge)[1] * FLOAT16_RESIDUAL_SCALE > LARGEST
    with pytest.raises(LogitsNotFinite, match=r"not finite in float16 .*give --dtype bfloat16 or float32"):
        serve(model, system, PROMPTS, 4, dtype="float16", **POOLS)
    assert serve(model, system, PROMPTS, 4, **POOLS)[0] == expected


def test_a_checkpoint_in_float16_keeps_its_residuals_in_it(tmp_path: Path) -> None:
    model = make_wide(tmp_path, dtype="float16")
    with pytest.raises(LogitsNotFinite, match="not finite in float16"):
        serve(model, "apex", PROMPTS, 4, dtype="float16", **POOLS)


def test_an_embedding_beyond_float16_ends_requests_too(tmp_path: Path) -> None:
    model = make_wide(tmp_path, 2.0**17, names=TO_RESIDUAL[:1])
    with pytest.raises(LogitsNotFinite, match="not finite in float16"):
        serve(model, "swiftllm", PROMPTS, 4, dtype="float16", **POOLS)
