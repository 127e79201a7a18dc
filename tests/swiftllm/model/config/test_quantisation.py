"""Which quantised checkpoints are taken, and what is said of the others."""

from __future__ import annotations

import json

import pytest
from quantise import quantisation_config

from swiftllm.model.config import ModelConfig
from swiftllm.model.quantisation import QuantisationScheme

AWQ = quantisation_config("awq", 32, False, False)
GPTQ = quantisation_config("gptq", 32, True, False)
PACKED = quantisation_config("compressed-tensors", 32, True, False)
WEIGHTS = PACKED["config_groups"]["group_0"]["weights"]


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
        ({**GPTQ, "dynamic": {"-:.*down.*": {}}}, "dynamic"),
        ({**AWQ, "version": "gemv"}, "version='gemv'"),
        ({**AWQ, "group_size": 24}, r"group_size=24 \(no multiple of 16\)"),
        ({**PACKED, "format": "float-quantized"}, "format='float-quantized'"),
        ({**PACKED, "config_groups": {}}, "0 config_groups"),
        ({**PACKED, "ignore": []}, "a quantised lm_head"),
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
