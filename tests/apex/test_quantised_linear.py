"""4-bit files of models with linear attention, laid out as their makers do: some modules are left in 16 bits.

Greedy tokens are those of transformers on the dequantised weights (float32).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import quantise
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from swiftllm.model.checkpoint import WeightsError
from swiftllm.model.config import ModelConfig
from swiftllm.model.weights import LlamaWeights, dummy_weights, load_weights
from swiftllm.ops.matrices import QuantisedMatrix
from swiftllm.runtime.memory import weight_bytes
from tests.apex.test_architectures import greedy, some_prompts
from tests.apex.test_linear_attention import make_engine, tokens_of
from tests.reference.tiny_experts import stack_experts
from tests.reference.tiny_linear import linear_judge, make_tiny_linear, make_tiny_wrapped

GROUP = 16
LEFT: dict[str, Any] = {"bits": 16, "data_type": "float"}
OFFICIAL = (  # of Qwen's own files
    {"lm_head": {}, "model.language_model.embed_tokens": {}}
    | {f"-:.*{part}.*": {} for part in ("attn", "shared_expert", "mtp", "visual")}
)
SMALL = r".*\.in_proj_(a|b|ba)"
PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_qkvz")
Change = Callable[[dict[str, Any]], Mapping[str, Any]]
"""Of the ``quantization_config`` that ``scripts/quantise.py`` writes."""


@dataclass(frozen=True)
class Case:
    """A file."""

    model: str
    layout: str
    left_out: str
    """Which modules keep their 16 bits: matches from the beginning of their names on."""
    config: Change
    symmetric: bool = True
    act_order: bool = False
    variant: str = "vllm"
    projections: tuple[str, ...] = PROJECTIONS
    """Modules that are quantised beside those of all models."""
    stacks_experts: bool = False
    """Whether the file has one tensor for the experts of a layer, which are not quantised."""


def dynamic(rules: Mapping[str, Any]) -> Change:
    return lambda given: {**given, "dynamic": rules}


def auto_round(packing: str, extra: Mapping[str, Any]) -> Change:
    common = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "data_type": "int", "iters": 200}
    how = {"packing_format": f"auto_round:{packing}", "block_name_to_quantize": "model.layers", "extra_config": extra}
    return lambda given: {**common, "sym": packing == "auto_gptq", **how}


def compressed(ignore: list[str], targets: list[str]) -> Change:
    def change(given: dict[str, Any]) -> Mapping[str, Any]:
        group = {**given["config_groups"]["group_0"], "targets": targets}
        return {**given, "ignore": ignore, "config_groups": {"group_0": group}}

    return change


CASES = {
    "gptq, Qwen's own": Case("wrapped", "gptq", r".*attn.*", dynamic(OFFICIAL)),
    "gptq, a part of a matrix": Case(
        "Qwen3_5Moe",
        "gptq-v2",
        rf".*shared_expert\.|.*in_proj_z|.*layers\.3\.self_attn\.k|{SMALL}",
        dynamic(
            {r"-:.*shared_expert\.": {}, "-:.*in_proj_z": {}, r"-:model.layers.3.self_attn\.k": {}}
            | {"+:.*down_proj": {"bits": 4, "group_size": GROUP, "mse": 2.0}, f"-:{SMALL}": {}}
        ),
        symmetric=False,
        variant="apex-overlap",
    ),
    "gptq, act-order and all matrices": Case(
        "Qwen3_5", "gptq", "nothing", dynamic({}), act_order=True, projections=(*PROJECTIONS, "in_proj_a", "in_proj_b")
    ),
    "gptq, all matrices by key head": Case(
        "Qwen3Next", "gptq", "nothing", dynamic({}), projections=(*PROJECTIONS, "in_proj_ba")
    ),
    "auto-round, as gptq": Case(
        "Qwen3Next",
        "gptq",
        rf"model\.layers\.0\.linear_attn\.in_proj_qkvz|.*shared_expert\.|model\.layers\.3\.self_attn\.v_proj|{SMALL}",
        auto_round(
            "auto_gptq",
            {"model.layers.0.linear_attn.in_proj_qkvz": LEFT, r"mlp\.shared_expert\..*": LEFT, SMALL: LEFT}
            | {"model.layers.3.self_attn.v_proj": LEFT, "model.layers.3.self_attn.k_proj": {"bits": 4, "sym": True}},
        ),
    ),
    "auto-round, as awq": Case(
        "Qwen3_5",
        "awq",
        rf".*layers\.3\.self_attn\.q_proj|model\.layers\.0\.mlp\.gate_proj|{SMALL}",
        auto_round(
            "auto_awq",
            {"model.layers.3.self_attn.q_proj": LEFT, "model.layers.0.mlp.gate_proj": LEFT, SMALL: LEFT},
        ),
        symmetric=False,
        variant="swiftllm",
    ),
    "compressed-tensors, modules that are ignored": Case(
        "wrapped",
        "compressed-tensors",
        rf".*layers\.0\.linear_attn\.in_proj_z|{SMALL}",
        compressed(
            ["lm_head", "re:.*visual.*", "re:.*in_proj_[ab]$", "model.language_model.layers.0.linear_attn.in_proj_z"],
            ["Linear"],
        ),
        symmetric=False,
    ),
    "compressed-tensors, experts alone": Case(
        "Qwen3Next",
        "compressed-tensors",
        r".*attn.*|.*shared_expert\.",
        compressed(["lm_head", r"re:.*\.mlp\.gate$"], [r"re:.*\.mlp\.experts\..*"]),
        variant="neo",
    ),
    "compressed-tensors, all but experts": Case(
        "Qwen3_5Moe",
        "compressed-tensors",
        rf".*\.experts\.|{SMALL}",
        compressed(["lm_head", r"re:.*\.experts", f"re:{SMALL}"], ["Linear"]),
        stacks_experts=True,
    ),
}


def write(source: Path, target: Path, layout: str, case: Case) -> Path:
    """``source`` again, but for what is left out with 4-bit weights, or these dequantised."""
    quantise.write_folder(source, target, layout, GROUP, case.symmetric, case.act_order)
    written, original = load_file(target / "model.safetensors"), load_file(source / "model.safetensors")
    for name, tensor in original.items():
        module = name.removesuffix(".weight")
        if re.match(case.left_out, module):
            written = {other: own for other, own in written.items() if not other.startswith(f"{module}.")}
            written[name] = tensor
    save_file(written, target / "model.safetensors", {"format": "pt"})
    return target


def change_config(folder: Path, change: Change) -> None:
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({**raw, "quantization_config": change(raw["quantization_config"])}))


def matrices_of(weights: LlamaWeights) -> list[torch.Tensor | QuantisedMatrix]:
    """All that are or might be quantised, in the order of their use."""
    stages = range(-1, len(weights.layers))
    taken = [matrix for stage in stages for matrix, _ in weights.take_linears(stage).values()]
    return [part for matrix in taken for part in (matrix if isinstance(matrix, tuple) else (matrix,))]


def shapes(matrices: list[torch.Tensor | QuantisedMatrix]) -> list[tuple[bool, tuple[int, ...]]]:
    return [(isinstance(m, torch.Tensor), (m if isinstance(m, torch.Tensor) else m.codes).shape) for m in matrices]


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_memory_are_those_of_the_dequantised_weights(name, tmp_path, monkeypatch) -> None:
    case = CASES[name]
    monkeypatch.setattr(quantise, "MODULES", (*quantise.MODULES, *case.projections))
    make = (
        make_tiny_wrapped
        if case.model == "wrapped"
        else lambda path: make_tiny_linear(path, case.model, num_hidden_layers=4)
    )
    source, load_judge = make(tmp_path / "source"), linear_judge
    if case.model == "wrapped":
        load_judge = lambda folder: AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)  # noqa: E731
    packed = write(source, tmp_path / "packed", case.layout, case)
    change_config(packed, case.config)
    if case.stacks_experts:
        stack_experts(packed)
    tensors = load_file(packed / "model.safetensors")
    tensors["mtp.layers.0.mlp.down_proj.qweight"] = torch.zeros(8, 64, dtype=torch.int32)
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    expected = greedy(load_judge(write(source, tmp_path / "dense", "dequantised", case)), some_prompts(3), 5)
    engine = make_engine(packed, case.variant)
    assert tokens_of(engine, some_prompts(3), 5) == expected
    engine.close()

    model = ModelConfig.from_folder(packed)
    weights = load_weights(packed, model, "cpu", torch.float32)
    dummies = dummy_weights(model, "cpu", torch.float32)
    if not case.act_order:  # where modules may have orders of their own
        loaded = matrices_of(weights)
        assert shapes(loaded) == shapes(matrices_of(dummies))
        others = weights.by_checkpoint_name(model).values()
        assert sum(m.nbytes for m in (*loaded, *others)) == weight_bytes(model, torch.float32)
    shutil.copy(packed / "config.json", tmp_path / "config.json")
    without_files = ModelConfig.from_folder(tmp_path)
    if not model.quantisation.quantises_decay:
        assert weight_bytes(without_files, torch.float32) == weight_bytes(model, torch.float32)


def test_routers_and_gates_that_are_quantised_are_refused(tmp_path) -> None:
    folder = make_tiny_linear(tmp_path / "model", "Qwen3Next", num_hidden_layers=4)
    tensors = load_file(folder / "model.safetensors")
    for gate in ("gate", "shared_expert_gate"):
        name = f"model.layers.0.mlp.{gate}.qweight"
        save_file(tensors | {name: torch.zeros(8, 8, dtype=torch.int32)}, folder / "model.safetensors")
        with pytest.raises(WeightsError, match=rf"\.mlp\.{gate}\.qweight: routers that are quantised"):
            load_weights(folder, ModelConfig.from_folder(folder), "cpu", torch.float32)
