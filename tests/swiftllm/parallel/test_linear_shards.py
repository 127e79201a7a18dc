"""Models with linear attention on several ranks: the parts are the whole, and give its logits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import quantise
import torch
from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3NextConfig

from swiftllm.config import EngineConfig
from swiftllm.device import HostDevice
from swiftllm.machine import InsufficientMemory
from swiftllm.model.config import LinearSizes, ModelConfig
from swiftllm.model.llama import LlamaModel
from swiftllm.model.quantisation import GPTQ, QuantisationScheme
from swiftllm.model.weights import LayerWeights, LlamaWeights, dummy_weights, load_weights
from swiftllm.ops.interface import Ops
from swiftllm.parallel.shards import Shard, ShardedWeights, load_rank
from swiftllm.runtime.memory import WeightSizes
from tests.reference.tiny_linear import KINDS, linear_judge, make_tiny_linear
from tests.swiftllm.model.test_linear_attention import OF_27B, read
from tests.swiftllm.model.test_llama import whole_prompt_logits
from tests.swiftllm.model.weights.quantised.test_loading import dense
from tests.swiftllm.parallel.test_quantised_shards import joined

SIZE, LAYERS = 2, 4
CASES = {  # name: kind, layout, symmetric, act-order
    **{name: (name, None, False, False) for name in KINDS},
    "Qwen3Next awq": ("Qwen3Next", "awq", False, False),
    "Qwen3_5 gptq act-order": ("Qwen3_5", "gptq", False, True),
    "Qwen3_5Moe compressed-tensors": ("Qwen3_5Moe", "compressed-tensors", True, False),
}
INPUTS = ("o", "down", "out_proj", "shared_down")
QUANTISED_TOO = ("in_proj_qkv", "in_proj_qkvz", "in_proj_z")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Of each case the model, and what transformers reads of it."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantise, "MODULES", (*quantise.MODULES, *QUANTISED_TOO))
        for name, (kind, layout, symmetric, act_order) in CASES.items():
            path = tmp_path_factory.mktemp("tiny")
            more = {} if KINDS[kind].get("num_experts") is None else {"shared_expert_intermediate_size": 64}
            source = make_tiny_linear(path / "source", kind, num_hidden_layers=LAYERS, **more)
            found[name] = source, source
            if layout is not None:
                found[name] = path / "packed", path / "dense"
                for target, written in zip(found[name], (layout, "dequantised"), strict=True):
                    quantise.write_folder(source, target, written, 16, symmetric, act_order)
    return found


def load_parts(folder: Path) -> tuple[ModelConfig, list[Shard], list[LlamaWeights]]:
    model = ModelConfig.from_folder(folder)
    shards = [Shard(model, rank, SIZE) for rank in range(SIZE)]
    return model, shards, [load_weights(folder, model, "cpu", torch.float32, shard) for shard in shards]


def linear_of(model: ModelConfig) -> LinearSizes:
    assert model.linear is not None
    return model.linear


@pytest.mark.parametrize("name", CASES)
def test_the_parts_make_up_the_whole(folders, name: str) -> None:
    """Part by part of what a fused matrix stacks, in whole heads."""
    folder, _ = folders[name]
    model, shards, parts = load_parts(folder)
    whole, sizes = load_weights(folder, model, "cpu", torch.float32), shards[0].sizes
    linear, shared = linear_of(sizes), None if sizes.experts is None else sizes.experts.shared_size
    heads, kv_heads = (count * sizes.head_dim for count in (sizes.num_heads, sizes.num_kv_heads))
    stacked = {
        "qkv": (heads, heads, kv_heads, kv_heads),  # the first are gates
        "in_proj": (linear.keys_size, linear.keys_size, linear.values_size, linear.values_size),
        "in_proj_ba": (linear.num_value_heads,) * 2,
        "gate_up": (sizes.intermediate_size,) * (2 if sizes.experts is None else 2 * sizes.experts.num_experts),
        "shared_gate_up": (shared, shared),
        "conv": (linear.keys_size, linear.keys_size, linear.values_size),
        "a_log": (linear.num_value_heads,),
        "dt_bias": (linear.num_value_heads,),
        **dict.fromkeys(INPUTS, ()),
    }
    checked = set()
    for layer, *own in zip(*map(layers_of, (whole, *parts)), strict=True):
        for field, expected in vars(layer).items():
            pieces = [getattr(part, field) for part in own]
            if expected is None:
                assert pieces == [None] * SIZE, field
            elif field in stacked:
                checked.add(field)
                assert torch.equal(joined(pieces, stacked[field], field in INPUTS), dense(expected)), field
            else:
                assert all(torch.equal(piece, expected) for piece in pieces), field
    assert checked == {name for name in stacked if shared is not None or not name.startswith("shared")}


def layers_of(weights: LlamaWeights) -> list[LayerWeights]:
    return [*weights.layers, *chain.from_iterable(weights.linear_layers)]


class Together:
    """Ranks that are threads of this process: sums, and columns side by side.

    Attributes:
        exchanges: how many of these there were.
    """

    def __init__(self) -> None:
        self.exchanges = 0
        self._barrier = threading.Barrier(SIZE, timeout=60)
        self._parts: list[torch.Tensor] = [torch.empty(0)] * SIZE

    def of_all(self, rank: int, part: torch.Tensor) -> list[torch.Tensor]:
        self._parts[rank] = part.clone()
        self._barrier.wait()
        found = list(self._parts)
        if self._barrier.wait() == 0:  # of one thread
            self.exchanges += 1
        return found

    def group(self, rank: int) -> SimpleNamespace:
        def gather(columns: torch.Tensor, width: int) -> torch.Tensor:
            return torch.cat(self.of_all(rank, columns), 1)[:, :width]

        return SimpleNamespace(
            rank=rank, size=SIZE, gather=gather, all_reduce=lambda own: own.copy_(sum(self.of_all(rank, own)))
        )


def logits_of_ranks(
    model: ModelConfig, shards: list[Shard], parts: list[LlamaWeights], token_ids: list[int]
) -> torch.Tensor:
    together, found, errors = Together(), {}, []

    def compute(rank: int) -> None:
        try:
            sizes, ops = shards[rank].sizes, Ops()
            weights = ShardedWeights(sizes, parts[rank], ops, together.group(rank), model.vocab_size)
            found[rank] = whole_prompt_logits(LlamaModel(sizes, weights, ops, num_slots=1), token_ids)
        except BaseException as error:
            errors.append(error)
            together._barrier.abort()

    threads = [threading.Thread(target=compute, args=(rank,)) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert together.exchanges == 2 * LAYERS + 2  # and those of the embedding and of logits
    return found[0]


def some_tokens() -> list[int]:
    return torch.randint(3, 128, (70,), generator=torch.Generator().manual_seed(1)).tolist()


def expected_logits(folder: Path, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return linear_judge(folder)(torch.tensor([token_ids])).logits[0]


@pytest.mark.parametrize("name", CASES)
def test_logits_of_two_ranks_equal_transformers(folders, name: str) -> None:
    folder, judged_by = folders[name]
    logits = logits_of_ranks(*load_parts(folder), some_tokens())
    torch.testing.assert_close(logits, expected_logits(judged_by, some_tokens()), rtol=2e-3, atol=2e-3)


def across_parts(whole: torch.Tensor, rank: int) -> torch.Tensor:
    """Consecutive rows of queries, keys and values together, not of each of them."""
    return whole.chunk(SIZE)[rank]


def without_the_first_rows_of_k(whole: torch.Tensor, rank: int) -> torch.Tensor:
    """As if the keys of the first rank were everyone's."""
    keys = whole[32:64].chunk(SIZE)[0]
    return torch.cat([whole[:32].chunk(SIZE)[rank], keys, whole[64:].chunk(SIZE)[rank]])


@pytest.mark.parametrize("cut", [across_parts, without_the_first_rows_of_k])
@pytest.mark.parametrize("kind", KINDS)
def test_a_convolution_that_is_cut_elsewhere_gives_other_logits(
    folders, kind: str, cut: Callable[[torch.Tensor, int], torch.Tensor]
) -> None:
    """What the test above would find."""
    folder, _ = folders[kind]
    model, shards, parts = load_parts(folder)
    whole = load_weights(folder, model, "cpu", torch.float32)
    for rank, part in enumerate(parts):
        for own, of_all in zip(part.linear_layers[0], whole.linear_layers[0], strict=True):
            wrong = cut(of_all.conv, rank)
            assert wrong.shape == own.conv.shape
            own.conv.copy_(wrong)
    logits = logits_of_ranks(model, shards, parts, some_tokens())
    assert (logits - expected_logits(folder, some_tokens())).abs().max() > 0.1


def test_dummy_weights_of_the_parts_are_those_of_the_whole(folders, monkeypatch) -> None:
    monkeypatch.setattr("swiftllm.model.weights.DUMMY_PERIOD", 1009)
    model = ModelConfig.from_folder(folders["Qwen3_5Moe"][0])
    whole = dummy_weights(model, "cpu", torch.float32, 3).by_checkpoint_name(model)
    shards = [Shard(model, rank, SIZE) for rank in range(SIZE)]
    parts = [dummy_weights(model, "cpu", torch.float32, 3, s).by_checkpoint_name(s.sizes) for s in shards]
    for name, tensor in whole.items():
        pieces = [part[name] for part in parts]
        if pieces[0].shape != tensor.shape:
            axis = next(axis for axis, n in enumerate(tensor.shape) if n != pieces[0].shape[axis])
            assert torch.equal(torch.cat(pieces, axis), tensor), name
    divided = {name.rsplit(".", 2)[1] for name, tensor in whole.items() if parts[0][name].shape != tensor.shape}
    assert {"q_conv1d", "k_conv1d", "v_conv1d", "in_proj_q", "in_proj_k", "in_proj_v", "linear_attn"} < divided


def test_models_that_do_not_divide_are_refused_with_the_numbers_that_do(folders) -> None:
    model = ModelConfig.from_folder(folders["Qwen3_5Moe"][0])
    linear, experts = linear_of(model), model.experts
    assert experts is not None
    wide = replace(
        model,
        num_heads=12,
        num_kv_heads=12,
        intermediate_size=96,
        linear=replace(linear, num_key_heads=6, num_value_heads=12, key_dim=32, value_dim=32),
        experts=replace(experts, shared_size=96),
    )
    for changed, ranks, message in (
        (wide, 4, "12 heads, 12 KV heads, 6 key heads, 12 value heads and FFNs of 96 and 96: take one of 1, 2, 3, 6$"),
        (replace(wide, experts=replace(experts, shared_size=32)), 3, "FFNs of 96 and 32: take one of 1, 2$"),
        (replace(wide, experts=None), 12, "12 value heads and FFN of 96: take one of 1, 2, 3, 6$"),
    ):
        with pytest.raises(ValueError, match=rf"tensor_parallel={ranks} does not divide the model's .*{message}"):
            changed.shard(ranks)
    assert (part := linear_of(wide.shard(3))).num_key_heads == 2 and part.num_value_heads == 4
    for linear, shared, works in (
        (wide.linear, 96, "1, 2, 3, 6"),
        (replace(wide.linear, value_dim=20), 96, "1, 3"),  # 240 values: 120 and 40 are no whole groups, 80 are
        (replace(wide.linear, key_dim=4), 96, "1, 3"),  # 24 keys: 12 and 4 are no whole words
        (wide.linear, 48, "1, 3"),  # of the shared expert
    ):
        scheme = QuantisationScheme(GPTQ, 16)
        sizes = replace(wide, linear=linear, experts=replace(experts, shared_size=shared), quantisation=scheme)
        with pytest.raises(ValueError, match=rf"tensor_parallel=4 .* whole groups .* take one of {works}$"):
            sizes.shard(4)


@pytest.mark.parametrize("group_size", [None, 128])
def test_the_published_models_divide_as_the_documents_have_it(tmp_path, group_size: int | None) -> None:
    for config, name, works in (
        (Qwen3_5TextConfig(**OF_27B), "Qwen3_5ForCausalLM", "1, 2, 4"),
        (Qwen3_5MoeTextConfig(), "Qwen3_5MoeForCausalLM", "1, 2"),
        (Qwen3NextConfig(), "Qwen3NextForCausalLM", "1, 2"),
    ):
        model = read(tmp_path, config, name)
        if group_size is not None:
            model = replace(model, quantisation=QuantisationScheme(GPTQ, group_size))
        with pytest.raises(ValueError, match=rf"take one of {works}$"):
            model.shard(8)
        for ranks in map(int, works.split(", ")):
            assert model.shard(ranks).state_bytes(2) * ranks == model.state_bytes(2)


def test_a_rank_holds_its_part_of_the_states(folders, monkeypatch) -> None:
    """And only that counts, where there is no room for all."""
    folder = folders["Qwen3Next"][0]
    model, group = ModelConfig.from_folder(folder), SimpleNamespace(rank=1, size=SIZE, all_agree=None)
    sizes = Shard(model, 1, SIZE).sizes
    assert sizes.state_bytes(4) * SIZE == model.state_bytes(4)
    free = WeightSizes.of(sizes, torch.float32).total + 3 * sizes.state_bytes(4)
    monkeypatch.setattr(HostDevice, "free_bytes", lambda _: SIZE * free)
    config = EngineConfig(str(folder), device="cpu", dtype="float32", tensor_parallel=SIZE, max_num_seqs=4)
    with pytest.raises(InsufficientMemory, match="set max_num_seqs to 3 or less"):
        load_rank(config, HostDevice(), group)
    loaded = load_rank(replace(config, max_num_seqs=3), HostDevice(), group)
    states = loaded.model.states
    assert states.recurrent.nbytes + states.conv.nbytes == 3 * sizes.state_bytes(4)
    monkeypatch.setattr("swiftllm.runtime.torch_backend.available_host_bytes", lambda: 1 << 30)
    assert loaded.host_bytes(SIZE) == (1 << 29) - 3 * sizes.state_bytes(4)
