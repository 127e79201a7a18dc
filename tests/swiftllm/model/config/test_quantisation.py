"""Which quantised checkpoints are taken, and what is said of the others."""

from __future__ import annotations

import json

import pytest
from quantise import quantisation_config, write_folder
from safetensors.torch import load_file, save_file

from swiftllm.model.config import ModelConfig
from swiftllm.model.quantisation import QuantisationScheme

AWQ = quantisation_config("awq", 32, False, False)
GPTQ = quantisation_config("gptq", 32, True, False)
PACKED = quantisation_config("compressed-tensors", 32, True, False)
WEIGHTS = PACKED["config_groups"]["group_0"]["weights"]
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int"}


def packed(**weights) -> dict:
    return {**PACKED, "config_groups": {"group_0": {"targets": ["Linear"], "weights": {**WEIGHTS, **weights}}}}


@pytest.mark.parametrize(
    "given, described",
    [
        (AWQ, "4-bit AWQ, groups of 32"),
        ({**AWQ, "version": "GEMM", "group_size": -1}, "4-bit AWQ, one group"),
        ({**GPTQ, "desc_act": True, "checkpoint_format": "gptq_v2"}, "4-bit GPTQ, groups of 32, act-order"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64}, "4-bit GPTQ, groups of 64"),
        (PACKED, "4-bit compressed-tensors, groups of 32"),
        (packed(strategy="channel", group_size=None), "4-bit compressed-tensors, one group"),
        (packed(actorder="static"), "4-bit compressed-tensors, groups of 32"),
        (packed(actorder="group"), "4-bit compressed-tensors, groups of 32, act-order"),
        ({**GPTQ, "format": "gptq_v2", "dynamic": {"-:.*down.*": {}}}, "4-bit GPTQ, groups of 32"),
        ({**AUTO_ROUND, "packing_format": "auto_round:auto_gptq"}, "4-bit GPTQ, groups of 32"),
        ({**AUTO_ROUND, "packing_format": "auto_round:auto_awq", "sym": False}, "4-bit AWQ, groups of 32"),
        (
            {**PACKED, "config_groups": {name: PACKED["config_groups"]["group_0"] for name in "ab"}},
            "4-bit compressed-tensors, groups of 32",
        ),
    ],
)
def test_supported_schemes(given, described, tmp_path) -> None:
    assert QuantisationScheme.from_config({"quantization_config": given}, tmp_path).describe() == described


@pytest.mark.parametrize(
    "given, what",
    [
        ({"quant_method": "fp8"}, "quant_method='fp8'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method='bitsandbytes'"),
        ({**GPTQ, "bits": 8}, "bits=8"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        ({**GPTQ, "lm_head": True}, "lm_head=True"),
        ({**AUTO_ROUND, "bits": 8}, "bits=8"),
        ({**AUTO_ROUND, "data_type": "mx_fp"}, "data_type='mx_fp'"),
        ({**AUTO_ROUND, "act_bits": 8}, "act_bits=8"),
        ({**AUTO_ROUND, "packing_format": "auto_round:llm_compressor"}, "packing_format='auto_round:llm_compressor'"),
        ({**AWQ, "version": "gemv"}, "version='gemv'"),
        ({**AWQ, "group_size": 24}, r"group_size=24 \(no multiple of 16\)"),
        ({**PACKED, "format": "float-quantized"}, "format='float-quantized'"),
        ({**PACKED, "config_groups": {}}, "0 config_groups"),
        ({**PACKED, "ignore": []}, "a quantised lm_head"),
        ({**PACKED, "config_groups": {"a": {"targets": ["LlamaMLP"], "weights": WEIGHTS}}}, "targets=.*LlamaMLP"),
        (
            {
                **PACKED,
                "config_groups": {
                    "a": {"targets": ["Linear"], "weights": WEIGHTS},
                    "b": {"targets": ["re:.*"], "weights": {**WEIGHTS, "group_size": 64}},
                },
            },
            "2 config_groups",
        ),
        (packed(num_bits=8), "num_bits=8"),
        (packed(strategy="tensor"), "strategy='tensor'"),
    ],
)
def test_other_schemes_are_refused_with_what_would_do(given, what, tiny_model_dir, tmp_path) -> None:
    raw = json.loads((tiny_model_dir() / "config.json").read_text()) | {"quantization_config": given}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=rf"{what}.* are not supported; supported are 4-bit AWQ .* take another"):
        ModelConfig.from_folder(tmp_path)


def test_a_scheme_for_the_cache_is_left_out_with_a_word(tmp_path, caplog) -> None:
    """vLLM without --kv-cache-dtype fp8 keeps the cache in the model's dtype, too."""
    given = {**PACKED, "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    assert QuantisationScheme.from_config({"quantization_config": given}, tmp_path).group_size == 32
    (told,) = caplog.messages
    assert str(tmp_path) in told and "kv_cache_scheme" in told
    assert QuantisationScheme.from_config({"quantization_config": {**given, "config_groups": {}}}, tmp_path) is None


def test_groups_that_do_not_divide_the_inputs_are_refused(tiny_model_dir, tmp_path) -> None:
    raw = json.loads((tiny_model_dir() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": {**AWQ, "group_size": 64}}))
    with pytest.raises(ValueError, match="groups of 64 do not divide 96 inputs: take a checkpoint with groups of"):
        ModelConfig.from_folder(tmp_path)


def test_old_checkpoints_say_it_in_a_file_of_their_own(tiny_model_dir, tmp_path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_model_dir() / "config.json").read_bytes())
    assert ModelConfig.from_folder(tmp_path).quantisation is None
    old = {"bits": 4, "group_size": 32, "desc_act": True, "sym": True, "true_sequential": True}
    (tmp_path / "quantize_config.json").write_text(json.dumps(old))
    scheme = ModelConfig.from_folder(tmp_path).quantisation
    assert (scheme.method, scheme.ordered, scheme.zero_offset) == ("GPTQ", True, 1)


@pytest.fixture(scope="module")
def files(tmp_path_factory, tiny_model_dir):
    """Folders whose matrices are all quantised, by layout, but for one that keeps its 16 bits: it comes first."""
    folders = {}
    for layout in ("gptq", "awq", "compressed-tensors"):
        folder = tmp_path_factory.mktemp("files") / layout
        write_folder(tiny_model_dir(), folder, layout, 32, symmetric=layout == "compressed-tensors")
        plain = load_file(tiny_model_dir() / "model.safetensors")
        tensors = {name: own for name, own in load_file(folder / "model.safetensors").items() if LEFT not in name}
        save_file(tensors | {f"{LEFT}.weight": plain[f"{LEFT}.weight"]}, folder / "model.safetensors")
        folders[layout] = folder
    return folders


LEFT = "model.layers.0.mlp.down_proj"
DOWN = r"model.layers.1.mlp.down_proj"
AUTO_AWQ = {**AUTO_ROUND, "packing_format": "auto_round:auto_awq"}
PLAIN = {"bits": 16, "data_type": "float"}


def scheme_of(folder, given: dict) -> QuantisationScheme | None:
    return QuantisationScheme.from_config({"quantization_config": given}, folder)


@pytest.mark.parametrize(
    "layout, given",
    [
        ("gptq", {"dynamic": {"-:.*layers.0.mlp.down": {}, "-:.*visual": {}, "lm_head": {}, "-:lm_head": {"bits": 8}}}),
        ("gptq", {"dynamic": {r"+:.*\.1\..*": {"bits": 4, "mse": 1}, r"-:.*1\.mlp": {}}}),  # the first one counts
        ("gptq", {"dynamic": {"-:down_proj": {}}}),  # which is not the beginning of a name
        ("awq", {"modules_to_not_convert": ["layers.0.mlp.down_proj", "mlp.down", "visual"]}),
        ("awq", {**AUTO_AWQ, "extra_config": {LEFT: PLAIN, DOWN: {"bits": 4, "group_size": 32}, "lm_head": PLAIN}}),
        ("awq", {**AUTO_AWQ, "extra_config": {r"\.0\.mlp\.down": PLAIN, "mlp": PLAIN}}),
        ("compressed-tensors", {"ignore": ["lm_head", LEFT, "mlp.down_proj", "re:down_proj"]}),
        ("compressed-tensors", {"ignore": []}),  # the files have an lm_head that is not quantised
    ],
)
def test_the_files_tell_which_modules_are_quantised(files, layout, given) -> None:
    common = {"gptq": GPTQ, "awq": AWQ, "compressed-tensors": PACKED}[layout]
    scheme = scheme_of(files[layout], {**common, **given})
    assert scheme.in_16_bits == {LEFT}
    assert scheme.describe().endswith("groups of 32, 1 matrix in 16 bits")
    assert scheme.keeps_16_bits(LEFT) and not scheme.keeps_16_bits(DOWN)


@pytest.mark.parametrize(
    "layout, given, message",
    [
        ("gptq", {"dynamic": {r"-:.*\.1\.mlp\.down": {}}}, f"says that {DOWN} is not quantised, and its weights are"),
        ("gptq", {"dynamic": {".*down": {"bits": 8}}}, f"with bits=8 of {DOWN} are not supported"),
        ("gptq", {"dynamic": {"+:.*1.mlp.down": {"group_size": 64}}}, f"group_size=64 of {DOWN} are not supported"),
        ("gptq", {"dynamic": {"-:(": {}}}, r"a pattern that is none: missing \)"),
        ("awq", {"modules_to_not_convert": ["mlp.down_proj"]}, f"{DOWN} is not quantised"),
        ("awq", {**AUTO_AWQ, "extra_config": {r"1\.mlp\.down": PLAIN}}, f"{DOWN} is not quantised"),
        ("awq", {**AUTO_AWQ, "extra_config": {DOWN: {"bits": 8}}}, f"bits=8 of {DOWN} are not supported"),
        ("compressed-tensors", {"ignore": [r"re:.*1\.mlp\.down"]}, f"{DOWN} is not quantised"),
        (
            "compressed-tensors",
            {"config_groups": {"a": {"targets": [r"re:.*(up|gate)_proj", r"re:.*self_attn"], "weights": WEIGHTS}}},
            f"{DOWN} is not quantised",
        ),
    ],
)
def test_a_module_that_is_stored_otherwise_is_refused_by_its_name(files, layout, given, message) -> None:
    common = {"gptq": GPTQ, "awq": AWQ, "compressed-tensors": PACKED}[layout]
    with pytest.raises(ValueError, match=message):
        scheme_of(files[layout], {**common, **given})


def test_so_are_quantised_matrices_of_the_vocabulary(files, tmp_path) -> None:
    tensors = load_file(files["gptq"] / "model.safetensors")
    tensors["lm_head.qweight"] = tensors.pop("lm_head.weight").int()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="with a quantised lm_head are not supported"):
        scheme_of(tmp_path, GPTQ)


def test_without_files_the_rules_tell(tmp_path) -> None:
    """As where only the config.json of a model is at hand."""
    for given in (
        {**GPTQ, "dynamic": {"-:model.language_model.layers.0.mlp.down": {}}},
        {**AWQ, "modules_to_not_convert": ["layers.0.mlp.down_proj"]},
        {**AUTO_ROUND, "extra_config": {LEFT: PLAIN}},
        {**PACKED, "ignore": ["lm_head", f"re:{LEFT}"]},
        {**PACKED, "config_groups": {"a": {"targets": ["re:.*layers.1.*"], "weights": WEIGHTS}}},
    ):
        scheme = scheme_of(tmp_path, given)
        assert scheme.keeps_16_bits(LEFT) and not scheme.keeps_16_bits(DOWN), given
