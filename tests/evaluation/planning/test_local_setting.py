"""A paper's setting on a machine: which one, with what pools, and what is refused with numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from apex.simulator.hardware.files import MODELS_DIR
from apex.simulator.paper_settings import load_setting
from evaluation.options import experiment_settings
from evaluation.planning import setting as module
from evaluation.planning.setting import GB, LocalSetting, NotApplicable, local_setting, panels_here
from evaluation.studies.papers import FigureOptions, figure_grid
from swiftllm.machine import GIB, Card
from tests.evaluation.papers_machines import A10, A10G, L4, RTX_3060, T4
from tests.reference.tiny_model import make_tiny_llama


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, and no checkpoint in the hub's."""
    monkeypatch.setenv("APEX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "try_to_load_from_cache", lambda *_: None)
    return tmp_path / "cache"


def fig5():
    return figure_grid(experiment_settings("fig5")["simulated"], FigureOptions())


def settings_on(card: Card, wanted: str | None = None) -> set[str]:
    return {panel["setting"] for panel in panels_here(fig5(), wanted, card, "apex").panels}


def on_card(card: Card | None, host_gib: float = 256.0, **options) -> LocalSetting:
    """The setting of Figure 5 on a machine, as the command line's options choose."""
    (name,) = settings_on(card, options.get("setting"))
    return local_setting(load_setting(name), card, int(host_gib * GIB), FigureOptions(**options))


@pytest.mark.parametrize(
    ("card", "setting", "title", "pools", "gpu_blocks", "limits", "model"),
    [
        (T4, "apex-t4", "T4 + Llama-2-7B", "papers", 54, (832, 832, 832), "llama-2-7b"),
        (A10, "apex-a10", "A10 + Llama-3.1-8B", "papers", 1650, (20480, 1024, 20480), "llama-3.1-8b"),
        (A10G, "apex-a10", "A10G + Llama-3.1-8B", "papers", 1650, (20480, 1024, 20480), "llama-3.1-8b"),
        (L4, "apex-a10", "L4 + Llama-3.1-8B", "card", None, (20480, 1024, 20480), "llama-3.1-8b"),
    ],
    ids=lambda value: value.name if isinstance(value, Card) else "",
)
def test_each_card_gets_its_setting(card, setting, title, pools, gpu_blocks, limits, model):
    assert settings_on(card) == {setting}
    here = on_card(card)
    engine, fit, paper = here.engine, here.fit, load_setting(setting)
    assert (here.name, here.title, here.pools, here.card) == (setting, title, pools, card)
    assert (engine.device, engine.dtype, engine.load_format, here.weights) == ("cuda", "float16", "dummy", "dummy")
    assert (engine.max_num_batched_tokens, engine.max_num_seqs, engine.max_model_len) == limits
    assert engine.model == str(MODELS_DIR / model) and here.papers_model and engine.block_size == 16
    assert engine.num_cpu_blocks == paper.num_cpu_blocks
    assert engine.num_gpu_blocks == (fit.max_gpu_blocks if gpu_blocks is None else gpu_blocks)
    own_pool = [words for words in here.differences if "KV blocks that it holds" in words]
    assert len(own_pool) == (pools == "card") and "random weights" in here.differences
    row = here.row()
    assert (row["setting"], row["setting_title"], row["setting_origin"], row["weights"]) == (
        setting, title, pools, "dummy"
    )  # fmt: skip
    assert row["max_gpu_blocks"] == fit.max_gpu_blocks >= engine.num_gpu_blocks
    assert row["max_model_len"] == engine.max_model_len and row["cpu_kv_gb"] == pytest.approx(paper["cpu_kv_gb"], 0.01)


def test_all_blocks_that_a_card_holds_can_be_had():
    here = on_card(T4, all_gpu_blocks=True)
    assert here.pools == "card" and 54 < here.engine.num_gpu_blocks == here.fit.max_gpu_blocks < 110
    assert f"{here.engine.num_gpu_blocks} GPU blocks instead of 54" in here.differences
    chosen = on_card(T4, num_gpu_blocks=60, max_num_batched_tokens=256)
    assert (chosen.engine.num_gpu_blocks, chosen.engine.max_num_batched_tokens, chosen.pools) == (60, 256, "chosen")
    assert chosen.engine.max_num_seqs == 256, "an iteration has no more requests than tokens"
    assert "256 tokens per iteration instead of 832" in chosen.differences


def test_a_t4_has_no_bfloat16():
    with pytest.raises(ValueError, match="Tesla T4 has no bfloat16: use --dtype float16"):
        on_card(T4, dtype="bfloat16")
    assert on_card(A10G, dtype="bfloat16").engine.dtype == "bfloat16"
    assert on_card(T4, dtype="auto").engine.dtype == "float16"


@pytest.mark.parametrize(
    ("card", "options", "numbers"),
    [
        (RTX_3060, {}, r"setting apex-t4 does not fit here: the GPU has 11.64 GiB .* weights 12.55 GiB"),
        (T4, {"setting": "apex-a10"}, r"setting apex-a10 does not fit here: the GPU has 14.55 GiB .* 14.96 GiB"),
        (T4, {"num_gpu_blocks": 500}, r"3.91 GiB for num_gpu_blocks = 500 blocks; 7\d blocks fit"),
        (
            T4,
            {"num_gpu_blocks": 51},
            "the GPU pool has room for 816 tokens of KV cache, and its longest request has 832",
        ),
        (T4, {"host_gib": 0.5}, "host memory has room for 0 tokens of KV cache, and its longest request has 832"),
    ],
)
def test_what_does_not_fit_is_refused_with_numbers(card, options, numbers):
    with pytest.raises(ValueError, match=numbers):
        on_card(card, **options)


def test_the_longest_request_must_fit_the_host():
    fit = on_card(A10G).fit
    block_gib = fit.bytes_per_block / GIB
    headroom_gib = fit.host_headroom_bytes / GIB
    assert on_card(A10G, headroom_gib + 1280.5 * block_gib).engine.num_cpu_blocks == 1280
    refusal = r"host memory has room for 20,464 tokens .* request has 20,480; of 6\.6 GiB .* 4\.1 are for all else"
    with pytest.raises(ValueError, match=refusal):
        on_card(A10G, headroom_gib + 1279.5 * block_gib)


@pytest.mark.parametrize("host_gib", [4.0, 13.4])
def test_a_host_without_a_card_that_is_too_small_says_what_it_has(host_gib):
    """At the larger size the weights fit, and not all of the GPU tier."""
    message = rf"does not fit here: the host has {host_gib:.2f} GiB of memory .* num_cpu_blocks = 54 blocks; \d+ blocks"
    with pytest.raises(ValueError, match=message):
        on_card(None, host_gib, setting="apex-t4")


def test_a_smaller_host_gets_a_smaller_pool_and_is_told():
    here = on_card(A10G, 64.0)
    blocks = here.engine.num_cpu_blocks
    assert 0.8 * here.fit.max_cpu_blocks < blocks < here.fit.max_cpu_blocks < load_setting("apex-a10").num_cpu_blocks
    gb = blocks * here.fit.bytes_per_block / GB
    assert f"{gb:.0f} GB of KV cache in host memory instead of 120 GB" in here.differences and 55 < gb < 69
    assert here.row()["cpu_kv_gb"] == pytest.approx(gb, abs=0.1)
    assert not any("instead of 120" in words for words in on_card(A10G, 256.0).differences)


def test_a_smaller_pool_stays_the_same_while_free_memory_varies():
    """Pools are part of a run's identity, and an interrupted run is to be found again."""
    pools = {on_card(A10G, gib).engine.num_cpu_blocks for gib in (59.7, 60.0, 60.5, 61.0)}
    assert len(pools) == 1 and on_card(A10G, 50.0).engine.num_cpu_blocks not in pools


def test_a_checkpoint_in_the_cache_is_used_and_never_fetched(tmp_path, monkeypatch):
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "config.json").write_text((MODELS_DIR / "llama-2-7b" / "config.json").read_text())
    asked = []

    def cached(name, file):
        asked.append((name, file))
        return str(snapshot / file)

    monkeypatch.setattr(module, "try_to_load_from_cache", cached)
    assert on_card(T4).weights == "dummy", "a folder without weights"
    (snapshot / "model.safetensors").touch()
    here = on_card(T4)
    assert (here.weights, here.engine.model, here.engine.load_format) == ("checkpoint", str(snapshot), "auto")
    assert here.papers_model and here.differences == () and asked[-1] == ("meta-llama/Llama-2-7b-hf", "config.json")
    assert on_card(T4, load_format="dummy").weights == "dummy"


def test_another_model_is_said_to_be_another(tmp_path):
    model = make_tiny_llama(tmp_path / "tiny")
    here = on_card(T4, model=model)
    assert (here.weights, here.papers_model, here.engine.max_model_len) == ("checkpoint", False, 512)
    assert f"the model {model}" in here.differences
    with pytest.raises(FileNotFoundError, match="give --model a Hugging Face folder or a hub name"):
        on_card(T4, model=tmp_path / "none")
    fewer = on_card(T4, num_layers=2)
    shape = json.loads((MODELS_DIR / "llama-2-7b" / "config.json").read_text())
    assert json.loads(Path(fewer.engine.model, "config.json").read_text()) == {**shape, "num_hidden_layers": 2}
    assert not fewer.papers_model and fewer.title == "T4 + Llama-2-7B, 2 layers"
    assert fewer.engine.num_cpu_blocks == load_setting("apex-t4").num_cpu_blocks
    assert fewer.row()["cpu_kv_gb"] == pytest.approx(20 * 2 / 32, abs=0.1), "not all memory of a small machine"


def test_a_rehearsal_takes_no_card_and_keeps_the_heads_ratio():
    here = local_setting(load_setting("apex-a10"), A10G, 8 * GIB, FigureOptions(rehearse=True))
    assert here.card is None and here.engine.device == "cpu" and not here.papers_model
    config = json.loads(Path(here.engine.model, "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (4, 1)
    assert here.engine.num_gpu_blocks == 1650, "pools of the paper"


def test_figures_without_a_panel_for_the_card_say_which_they_have():
    fig7 = figure_grid(experiment_settings("fig7")["simulated"], FigureOptions())
    with pytest.raises(NotApplicable, match=r"no panel for Tesla T4, 16 GB; it has apex-a10"):
        panels_here(fig7, None, T4, "apex")
    with pytest.raises(NotApplicable, match="no panel for apex-t4; it has apex-a10"):
        panels_here(fig7, "apex-t4", A10G, "apex")
    assert {panel["setting"] for panel in panels_here(fig7, "neo-a10", T4, "apex").panels} == {"neo-a10"}
