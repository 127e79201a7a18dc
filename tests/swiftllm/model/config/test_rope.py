import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from swiftllm.model.rope import RopeScaling, inverse_frequencies, rotary_order, rotary_table
from swiftllm.ops.interface import Ops

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
SCALINGS = [{}, {"rope_type": "linear", "factor": 4.0}, LLAMA3, YARN]


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1 + n / 40 for n in range(32)],
    "long_factor": [1 + n / 4 for n in range(32)],
    "original_max_position_embeddings": 256,
}


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


def test_all_forms_of_yarn_equal_transformers():
    for form in (
        {"beta_fast": 20.0, "beta_slow": 3.0},
        {"truncate": False},
        {"attention_factor": 1.3},
        {"mscale": 0.8, "mscale_all_dim": 1.2},
        {"mscale": 1.0, "mscale_all_dim": 0},
        {"factor": 1.0},
        {"original_max_position_embeddings": 2048, "factor": 40.0},
    ):
        scaling = YARN | form
        theirs, ours = judge(scaling), RopeScaling.from_config(scaling)
        torch.testing.assert_close(inverse_frequencies(64, 1e4, ours), theirs.inv_freq, rtol=1e-6, atol=0)
        assert ours.amplitude == pytest.approx(theirs.attention_scaling), form


@pytest.mark.parametrize("form", [{}, {"attention_factor": 1.3}, {"factor": 4.0}, {"factor": 0.5}])
def test_longrope_equals_transformers_on_both_sides_of_the_first_context(form):
    theirs = judge(LONGROPE | form)
    ours = RopeScaling.from_config(LONGROPE | {"max_position_embeddings": 2048} | form)
    for longest in (256, 257, 2048):
        cos, sin = theirs(torch.empty(0), torch.arange(longest)[None])
        table = rotary_table(longest, 64, 1e4, ours)
        torch.testing.assert_close(table[:, 0], cos[0], rtol=0, atol=3e-4)
        torch.testing.assert_close(table[:, 1, 32:], sin[0, :, 32:], rtol=0, atol=3e-4)


def test_pairs_beyond_those_that_turn_stay():
    """Heads in the order of :func:`rotary_order` have the scores that they have in the checkpoint's order."""
    generator = torch.Generator().manual_seed(0)
    heads, positions = torch.randn(9, 2, 48, generator=generator), torch.randint(2048, (9,), generator=generator)
    for rotary_dim, is_interleaved in ((48, True), (24, True), (24, False), (16, False)):
        turned = heads.clone()
        halves = turned[..., :rotary_dim].unflatten(-1, (-1, 2) if is_interleaved else (2, -1))
        first, second = halves.unbind(-1 if is_interleaved else -2)
        angles = (positions[:, None] * inverse_frequencies(rotary_dim, 1e4, RopeScaling()))[:, None]
        pair = first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()
        turned[..., :rotary_dim] = torch.stack(pair, -1 if is_interleaved else -2).flatten(-2)
        order = rotary_order(48, rotary_dim, is_interleaved)
        ours = heads[..., order].contiguous()
        Ops().rotary_(ours, rotary_table(2048, 48, 1e4, RopeScaling(), rotary_dim, score_multiplier=4.0)[positions])
        torch.testing.assert_close(ours, 2 * turned[..., order], rtol=0, atol=1e-4)
    assert rotary_order(48, 48, False) is None


def test_unknown_scaling_is_refused_by_name():
    with pytest.raises(ValueError, match="dynamic"):
        RopeScaling.from_config({"rope_type": "dynamic", "factor": 2.0})
    with pytest.raises(ValueError, match="lacks the field 'original_max_position_embeddings'"):
        RopeScaling.from_config({"rope_type": "yarn", "factor": 2.0})
    with pytest.raises(ValueError, match="mrope_section"):
        RopeScaling.from_config({"mrope_section": [8, 12, 12]})
    with pytest.raises(ValueError, match="factor"):
        RopeScaling.from_config({"type": "linear"})
    with pytest.raises(ValueError, match="partial_rotary_factor"):
        RopeScaling.from_config({"rope_type": "default", "partial_rotary_factor": 0.5})


def test_the_bounds_of_yarn_lie_within_a_head():
    """A short first context has no pair that turns 32 times, and a low base one that turns once only beyond the head:
    transformers cuts both bounds to the head."""
    for original, theta in ((64, 1e4), (128, 1e4), (100_000, 100.0), (4, 1e4)):
        for whole in (True, False):
            scaling = YARN | {"original_max_position_embeddings": original, "truncate": whole}
            expected = judge(scaling, theta).inv_freq
            ours = inverse_frequencies(64, theta, RopeScaling.from_config(scaling))
            torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
