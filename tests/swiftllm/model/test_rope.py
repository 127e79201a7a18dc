import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from swiftllm.model.rope import RopeScaling, inverse_frequencies, rotary_table
from swiftllm.ops.interface import Ops

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
SCALINGS = [{}, {"rope_type": "linear", "factor": 4.0}, LLAMA3]


def judge(scaling: dict, theta: float = 1e4) -> LlamaRotaryEmbedding:
    parameters = {"rope_type": "default", **scaling, "rope_theta": theta}
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=2, max_position_embeddings=2048, rope_parameters=parameters
    )
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: s.get("rope_type", "default"))
@pytest.mark.parametrize("theta", [1e4, 5e5])
def test_frequencies_equal_transformers(scaling, theta):
    ours = inverse_frequencies(64, theta, RopeScaling.from_config(scaling))
    torch.testing.assert_close(ours, judge(scaling, theta).inv_freq, rtol=1e-6, atol=0)


def test_llama3_scaling_keeps_fast_divides_slow_and_blends_between():
    plain = inverse_frequencies(64, 1e4, RopeScaling())
    ratio = plain / inverse_frequencies(64, 1e4, RopeScaling.from_config(LLAMA3))
    wavelength = 2 * torch.pi / plain
    assert torch.all(ratio[wavelength < 256 / 4] == 1)
    torch.testing.assert_close(ratio[wavelength > 256], torch.full_like(ratio[wavelength > 256], 8.0))
    between = ratio[(wavelength > 256 / 4) & (wavelength < 256)]
    assert len(between) and torch.all((between > 1) & (between < 8))


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: s.get("rope_type", "default"))
# float32 angles near 2048 radians are good to 1e-4.
@pytest.mark.parametrize("dtype, atol", [(torch.float32, 1e-4), (torch.bfloat16, 4e-2), (torch.float16, 5e-3)])
def test_rotation_equals_transformers(scaling, dtype, atol):
    generator = torch.Generator().manual_seed(0)
    positions = torch.randint(2048, (9,), generator=generator)
    # A slice of a wider matrix, as Q and K are.
    wide = torch.randn(9, 7, 64, generator=generator).to(dtype)
    cos, sin = judge(scaling)(torch.empty(0), positions[None])
    expected, _ = apply_rotary_pos_emb(*2 * (wide[:, :5].float().transpose(0, 1)[None],), cos, sin)
    untouched = wide[:, 5:].clone()

    table = rotary_table(2048, 64, 1e4, RopeScaling.from_config(scaling))
    Ops().rotary_(wide[:, :5], table[positions])
    torch.testing.assert_close(wide[:, :5].float(), expected[0].transpose(0, 1), rtol=0, atol=atol)
    assert torch.equal(wide[:, 5:], untouched)


def test_unknown_scaling_is_refused_by_name():
    with pytest.raises(ValueError, match="yarn"):
        RopeScaling.from_config({"rope_type": "yarn", "factor": 2.0})
    with pytest.raises(ValueError, match="factor"):
        RopeScaling.from_config({"type": "linear"})
    with pytest.raises(ValueError, match="partial_rotary_factor"):
        RopeScaling.from_config({"rope_type": "default", "partial_rotary_factor": 0.5})
