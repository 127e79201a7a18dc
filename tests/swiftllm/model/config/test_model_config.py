"""What is read of a config.json, and what is refused."""

import dataclasses
import json
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from swiftllm.model.architectures import ARCHITECTURES
from swiftllm.model.config import ModelConfig
from swiftllm.model.rope import RopeScaling

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
MINISTRAL3 = {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3"}
MISTRAL3 = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
PHI3 = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
SMOLLM3 = {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
SEED_OSS = {"architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss"}
WINDOW = {"use_sliding_window": True, "sliding_window": 9}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
UNSUPPORTED = (
    ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*LlamaForCausalLM"),
    ({"architectures": ["LlamaForCausalLM", "GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
    ({"architectures": [{}]}, "supported are LlamaForCausalLM"),
    ({"model_type": "gemma"}, "gemma.*LlamaForCausalLM"),
    ({**MISTRAL, "sliding_window": 9, "layer_types": ["sliding_attention"] * 3}, "sliding_attention"),
    ({**MISTRAL, "sliding_window": 0}, "sliding_window=0"),
    ({**QWEN2, **WINDOW, "max_window_layers": 1}, "window in 2 of 3 layers .none, half or all.* is not supported"),
    ({**QWEN3, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "sliding_attention"),
    ({**QWEN3, **WINDOW, "layer_types": ["sliding_attention"] * 2}, "2 layer_types"),
    ({"sliding_window": 512}, "sliding_window"),
    ({"hidden_act": "gelu"}, "gelu"),
    ({**MISTRAL, "attention_bias": True}, "attention_bias=True in MistralForCausalLM"),
    ({"embedding_multiplier": 12.0}, "embedding_multiplier=12.0"),
    ({"logits_scaling": 8}, "logits_scaling=8"),
    ({"num_local_experts": 8}, "num_local_experts"),
    ({"final_logit_softcapping": 30.0}, "softcapping"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "config.json: rope scaling 'dynamic'"),
    ({"rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24]}}, "mrope_section.*one of .*yarn"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quant_method='fp8'"),
    ({"quantization_config": "awq"}, "quantization_config='awq'.*supported are 4-bit AWQ"),
    ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
    ({"num_key_value_heads": 0}, "num_kv_heads=0 must be at least 1"),
    ({**PHI3, "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8}}, "lacks the field 'long_factor'"),
    ({**PHI3, "rope_scaling": {**LONGROPE, "long_factor": [1.0] * 9}}, "short_factor and long_factor need 8 numbers"),
    ({**PHI3, "rope_scaling": {"type": "yarn", "factor": 2.0}}, "yarn.*supported are default, longrope"),
    ({**PHI3, "partial_rotary_factor": 0.2}, "rotary_dim=3 is odd"),
    ({**SMOLLM3, **WINDOW}, "sliding_window=9 without layer_types"),
    ({**MINISTRAL3, "rope_parameters": {"rope_type": "default"}}, "lacks 'llama_4_scaling_beta'"),
    ({**MISTRAL3, "text_config": {**SIZES, "model_type": "qwen2"}}, "around a text model with model_type='qwen2'"),
    ({**MISTRAL3, "text_config": {"model_type": "ministral3"}}, "lacks '"),
    ({"rms_norm_eps": None}, "makes no sense"),
    *(
        ({"head_dim": size}, rf"config\.json: head_dim={size} is no multiple of 8, as kernels need")
        for size in (0, 1, 4, 10, 12, 20, 63)
    ),
    ({"hidden_size": 48, "num_key_value_heads": 4}, "head_dim=12 is no multiple of 8"),
    ({"hidden_size": 66}, "hidden_size=66 is no multiple of num_attention_heads=4"),
)


@pytest.fixture
def read(tmp_path):
    def read(raw):
        (tmp_path / "config.json").write_text(json.dumps(raw))
        return ModelConfig.from_folder(tmp_path)

    return read


def test_what_is_not_supported_is_refused_with_the_reason_and_what_is(read):
    for change, message in UNSUPPORTED:
        with pytest.raises(ValueError, match=message):
            read(LLAMA | change)
    for name in SIZES.keys() - {"num_key_value_heads"}:
        with pytest.raises(ValueError, match=f"lacks '{name}'"):
            read({key: value for key, value in LLAMA.items() if key != name})


def test_fields_that_switch_a_part_off_are_no_reason_to_refuse(read):
    off = {
        "sliding_window": None,
        "rope_interleaved": False,
        "num_local_experts": 0,
        "embedding_multiplier": 1.0,
        "attn_logit_softcapping": None,
        "layer_types": ["full_attention"] * 3,
        "unsloth_version": "2025.1",
    }
    assert read(LLAMA | off) == read(LLAMA)
    window = {"sliding_window": 9, "max_window_layers": 2, "use_sliding_window": False}
    assert read(LLAMA | QWEN2 | window) == read(LLAMA | QWEN2)


def test_a_field_that_is_not_there_has_the_value_that_transformers_gives_it(read):
    for name, row in ARCHITECTURES.items():
        own = SIZES if row.linear is None else {**SIZES, "num_hidden_layers": 4}
        ours, kind = read({"architectures": [name], **own, "sliding_window": None}), CONFIG_MAPPING[row.model_type]
        theirs = kind(**own)
        rope = dict(theirs.rope_parameters)
        rope.pop("llama_4_scaling_beta", None)
        factor = rope.pop("partial_rotary_factor", 1.0)
        assert ours.rope_theta == rope["rope_theta"] and ours.rope_scaling == RopeScaling.from_config(rope), name
        assert (ours.rotary_dim or ours.head_dim) == factor * ours.head_dim
        assert ours.rms_norm_eps == theirs.rms_norm_eps * row.residual_scale**2, name
        for field in ("initializer_range", "tie_word_embeddings"):
            assert getattr(ours, field) == getattr(theirs, field), (name, field)
        assert (ours.named_positions or ours.max_position_embeddings) == theirs.max_position_embeddings
        assert ours.head_dim == (getattr(theirs, "head_dim", None) or 16)
        eos = theirs.eos_token_id
        assert ours.default_eos_token_ids == (() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,))
        # A window that is used unless config.json says otherwise, and heads where SIZES says nothing.
        defaults = {field.name: field.default for field in dataclasses.fields(kind)}
        sizes = {**own, "num_attention_heads": 32, "hidden_size": 512, "sliding_window": None}
        del sizes["num_key_value_heads"]
        assert read({"architectures": [name], **sizes}).num_kv_heads == (defaults["num_key_value_heads"] or 32)
        if row.windows == "alternating":
            four = {"architectures": [name], **SIZES, "num_hidden_layers": 4}
            assert read(four).windows == (defaults["sliding_window"], None) * 2
            continue
        has_window = defaults.get("sliding_window") is not None and not hasattr(theirs, "use_sliding_window")
        windows = (defaults["sliding_window"],) * 3 if has_window else None
        assert read({"architectures": [name], **own}) == dataclasses.replace(ours, windows=windows)


def test_windows_are_those_that_transformers_gives_the_layers(read):
    alternating = ["full_attention", "sliding_attention"] * 2
    cases = (
        {**MISTRAL, "sliding_window": 9},
        {**PHI3, "sliding_window": 9},
        {**PHI3, "sliding_window": 4096},  # as long as the model's longest request
        {**QWEN2, **WINDOW, "max_window_layers": 2},
        {**QWEN2, **WINDOW, "max_window_layers": 0},
        {**QWEN2, **WINDOW},
        {**QWEN3, **WINDOW, "layer_types": alternating},
        {**QWEN3, **WINDOW, "layer_types": alternating, "sliding_window": 32768},
        {**SMOLLM3, **WINDOW, "layer_types": alternating},
    )
    for case in cases:
        raw = LLAMA | {"num_hidden_layers": 4, "pad_token_id": None} | case
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**raw))
        theirs = [
            getattr(layer.self_attn, "sliding_window", model.config.sliding_window) for layer in model.model.layers
        ]
        theirs = [None if w is None or w >= model.config.max_position_embeddings else w for w in theirs]
        assert list(read(raw).windows or [None] * 4) == theirs, case


def test_biases_are_where_transformers_has_them(read):
    def biases(**raw):
        config = read(LLAMA | raw)
        return config.qkv_bias, config.o_bias, config.mlp_bias

    assert biases() == (False, False, False)
    assert biases(attention_bias=True) == (True, True, False)
    assert biases(mlp_bias=True) == (False, False, True)
    assert biases(**QWEN3, attention_bias=True) == (True, True, False)
    assert biases(**QWEN2) == biases(**QWEN2, attention_bias=False) == (True, False, False)
    assert biases(**SEED_OSS) == (True, False, False)
    assert biases(**SEED_OSS, attention_bias=False, attention_out_bias=True) == (False, True, False)
    assert biases(**MISTRAL) == (False, False, False)


def test_both_spellings_of_rope_are_read(read):
    new = read(LLAMA | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4}})
    old = read(LLAMA | {"rope_theta": 5e4, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert new == old
    assert (new.rope_theta, new.rope_scaling.kind, new.rope_scaling.factor) == (5e4, "linear", 2.0)


@pytest.mark.parametrize(
    ("own", "generation", "of_tokenizer", "expected"),
    [
        (2, [5, 7], None, {2, 5, 7}),
        (2, None, 9, {2, 9}),
        (None, None, 9, {9}),
        ([], [], 9, {9}),
        (..., ..., 9, {9}),
        (..., ..., None, {2}),  # transformers' LlamaConfig
        (None, ..., None, set()),
        (-1, 2000, 4000, set()),  # none of these can come
        ("</s>", [True, 5], None, {5}),
    ],
)
def test_all_end_tokens_count_that_any_file_names(read, tmp_path, own, generation, of_tokenizer, expected):
    """vLLM stops at those of generation_config.json and of the tokenizer; transformers at the former or, without the
    file, at those of config.json."""
    if generation is not ...:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    given = {name: value for name, value in LLAMA.items() if name != "eos_token_id"}
    config = read(given | ({} if own is ... else {"eos_token_id": own}))
    assert set(config.end_tokens(of_tokenizer)) == expected


def test_the_two_parts_of_a_wrapper_may_name_end_tokens(read):
    text = {**SIZES, "model_type": "ministral3", "eos_token_id": None}
    assert read({**MISTRAL3, "text_config": text, "eos_token_id": 3}).end_tokens(None) == (3,)
    assert set(read({**MISTRAL3, "text_config": {**text, "eos_token_id": [4]}, "eos_token_id": 3}).eos_token_ids) == {
        3,
        4,
    }


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        ({"rope_type": "default"}, 1024),
        ({"rope_type": "linear", "factor": 4.0}, 4096),
        ({"type": "linear", "factor": 1.5}, 1536),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 1024),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "yarn", "factor": 4.0}, 4096),
    ],
)
def test_scaled_positions_are_as_many_as_in_vllm(read, scaling, longest):
    """Its ``_get_and_verify_max_len``: the factor multiplies max_position_embeddings, but not with llama3 and longrope;
    with yarn it multiplies those of the first training, which are by default the same."""
    config = read({**LLAMA, "max_position_embeddings": 1024, "rope_scaling": scaling})
    assert config.longest_request(None) == config.longest_request(longest) == longest
    with pytest.raises(ValueError, match=f"exceeds the {longest} tokens"):
        config.longest_request(longest + 1)


def test_a_window_that_scaled_positions_exceed_is_one(read):
    linear = {"rope_type": "linear", "factor": 4.0}
    mistral = {**SIZES, **MISTRAL, "max_position_embeddings": 1024, "sliding_window": 2048}
    assert read(mistral).windows is None
    assert read({**mistral, "rope_scaling": linear}).windows == (2048,) * 3


def test_a_broken_generation_config_stops_no_start(read, tmp_path, caplog):
    """As in transformers and vLLM."""
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": ')
    assert read(LLAMA | {"eos_token_id": 3}).end_tokens(None) == (3,)
    assert "generation_config.json is not JSON" in caplog.text and "left aside" in caplog.text


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)


def test_a_request_may_not_reach_where_queries_are_scaled(read):
    """Ministral 3's own 16,384 tokens, or those that its rope_parameters name."""
    config = read({**MINISTRAL3, **SIZES})
    assert (config.longest_request(None), config.longest_request(16384)) == (16384, 16384)
    with pytest.raises(ValueError, match=r"exceeds 16384 tokens.*made for 262144, scales the queries"):
        config.longest_request(16385)
    rope = {**ARCHITECTURES["Ministral3ForCausalLM"].own["rope_parameters"], "llama_4_scaling_beta": 0.0}
    assert read({**MINISTRAL3, **SIZES, "rope_parameters": rope}).longest_request(None) == 262144


def test_longrope_has_long_factors_for_requests_that_ask_for_them(read):
    config = read({**LLAMA, **PHI3, "rope_scaling": LONGROPE, "max_position_embeddings": 131072})
    assert [config.longest_request(asked) for asked in (None, 100, 131072)] == [4096, 100, 131072]
    with pytest.raises(ValueError, match="exceeds the 131072 tokens"):
        config.longest_request(131073)
    assert config.rope_scaling.amplitude == pytest.approx(1.190238, abs=1e-6)  # of Phi-3 and 4 with 131,072 tokens


def test_layers_without_rotary_positions_are_listed_or_every_fourth(read):
    def without(**raw):
        return read({**SMOLLM3, **SIZES, "num_hidden_layers": 8} | raw).layers_without_rotary

    assert without() == {3, 7}
    assert without(no_rope_layer_interval=3) == {2, 5}
    assert without(no_rope_layers=[1, 1, 0, 1, 0, 1, 1, 1]) == {2, 4}


def test_the_configurations_beside_the_code_are_those_of_models_of_these_sizes(read):
    """Billions of parameters, as their cards say."""
    sizes = {"mistral-small-3": 23.57, "ministral-3-8b": 8.49, "phi-4": 14.66, "glm-4-9b": 9.40, "smollm3-3b": 3.08}
    sizes |= {"qwen2.5-3b": 3.09, "qwen2.5-7b": 7.62, "qwen2.5-14b": 14.77, "granite-3.3-8b": 8.17}
    sizes |= {"qwen3-4b": 4.02, "qwen3-8b": 8.19, "qwen3-14b": 14.77, "llama-3.2-3b": 3.21, "mistral-7b": 7.25}
    for name, billions in (sizes | {"phi-4-mini": 3.84}).items():
        assert ModelConfig.from_folder(Path("configs/models") / name).num_parameters / 1e9 == pytest.approx(
            billions, abs=0.005
        )
