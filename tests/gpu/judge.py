"""Tiny models that need no files, and what they think of a text: a plain forward pass on the CPU in float32.

Elsewhere the tests hold this pass against transformers; a machine with a GPU may have none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from swiftllm.model.config import ModelConfig
from swiftllm.model.llama import LlamaModel
from swiftllm.model.stages import LoadedWeights
from swiftllm.model.weights import dummy_weights
from swiftllm.ops.interface import Ops, StateChunk, StateRows
from tests.reference.paged_attention import attend_chunk

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "initializer_range": 0.15,  # large enough for greedy tokens to differ from step to step
}
OF_FOUR_LAYERS = {**CONFIG, "num_hidden_layers": 4, "sliding_window": 24}
WINDOWS = {
    "of all layers": {**OF_FOUR_LAYERS, "architectures": ["MistralForCausalLM"], "model_type": "mistral"},
    "of half of the layers": {
        **OF_FOUR_LAYERS,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 16,
        "use_sliding_window": True,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
}
GPT_OSS = {
    **OF_FOUR_LAYERS,
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "quantization_config": {"quant_method": "mxfp4"},
}
LINEAR = {
    **CONFIG,
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 8,  # of which two have full attention
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
CODED = {
    **CONFIG,
    "intermediate_size": 128,
    "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
}
SEED = 0


@contextmanager
def tiny_model(config: Mapping[str, Any] = CONFIG) -> Iterator[Path]:
    """A folder for ``load_format="dummy"`` and ``seed=SEED``."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield Path(folder)


class Judge:
    def __init__(self, model: Path) -> None:
        self._config = ModelConfig.from_folder(model)
        ops, weights = Ops(), dummy_weights(self._config, "cpu", torch.float32, SEED)
        self._model = LlamaModel(self._config, LoadedWeights(self._config, weights, ops), ops, num_slots=1)

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Of the token after each of ``tokens``: float32 ``[len(tokens), vocab_size]``."""
        model, scale = self._model, self._config.head_dim**-0.5
        residual, rotary_rows = model.embed(torch.tensor(tokens)), model.rotary_table[: len(tokens)]
        states = None
        if self._config.linear is not None:
            states = StateRows.of([StateChunk(0, len(tokens), is_first=True)], [], lambda tensor: tensor)
        qkv = model.first_stage(residual, rotary_rows, state_rows=states)
        windows = self._config.windows or (None,) * self._config.num_layers
        for layer, window in enumerate(windows):
            q, k, v = model.split_qkv(qkv)
            keys = k.transpose(0, 1), v.transpose(0, 1)
            out = model.gated(attend_chunk(model.ops, q, *keys, scale, window, model.sinks(layer)), qkv)
            if layer < self._config.num_layers - 1:
                qkv = model.stage(layer, out, residual, rotary_rows, state_rows=states)
        return model.last_stage(out, residual)

    def distance_below_best(self, prompt: Sequence[int], output: Sequence[int]) -> float:
        """How far the worst token of ``output`` lies below the model's own choice at its place, in standard deviations
        of the logits there."""
        logits = self.logits([*prompt, *output])[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        return float(((logits.max(-1).values - chosen) / logits.std(-1)).max())
