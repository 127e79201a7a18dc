"""Quality of a CPU tier's format: what a tiny model predicts and answers, against transformers and plain arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from evaluation import quality
from evaluation.studies.quality import ScoreTask, first_difference, hadamard, read_text, score, token_sequences
from tests.reference.tiny_model import make_tiny_llama
from tests.reference.tiny_tokenizer import make_tiny_tokenizer

LENGTH, SEQUENCES = 70, 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_llama(folder, torch_dtype="float32")
    make_tiny_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. " * 60)
    return path


@pytest.fixture(scope="module")
def scores(model: Path, text: Path) -> dict[str, dict]:
    names = ("exact-rotated", "int8", "int8-rotated")
    return {name: score(ScoreTask(model, name, SEQUENCES, LENGTH, text)) for name in names}


def test_the_exact_tier_predicts_what_transformers_predict(model: Path, text: Path, scores: dict) -> None:
    tokens = torch.tensor(token_sequences(read_text(text), model, SEQUENCES, LENGTH))
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(tokens).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    for row in scores.values():
        assert row["tokens"] == SEQUENCES * (LENGTH - 1)
        assert row["perplexity_exact"] == pytest.approx(loss.exp().item(), rel=2e-2)


def test_a_rotation_changes_nothing_but_rounding_and_eight_bits_change_little(scores: dict) -> None:
    rotated, eight_bits = scores["exact-rotated"], scores["int8"]
    assert 0 <= rotated["kl_divergence"] < eight_bits["kl_divergence"] < 1e-2
    assert rotated["equal_top"] >= 0.95 and eight_bits["equal_top"] >= 0.9
    errors = [[v for k, v in row.items() if k.startswith("worst_head_error_layer_")] for row in (rotated, eight_bits)]
    assert all(0 <= exact < int8 < 0.1 for exact, int8 in zip(*errors, strict=True))


def test_bins_of_contexts_hold_all_predictions(scores: dict) -> None:
    row = scores["int8"]
    bins = {int(name.removeprefix("kl_up_to_")): value for name, value in row.items() if name.startswith("kl_up_to_")}
    assert list(bins) == [34, 69]
    mean = (34 * bins[34] + 35 * bins[69]) / 69
    assert mean == pytest.approx(row["kl_divergence"])


def test_a_hadamard_matrix_is_its_own_inverse() -> None:
    matrix = hadamard(64)
    assert torch.allclose(matrix @ matrix, torch.eye(64), atol=1e-6)
    with pytest.raises(ValueError, match="power of two, not 80"):
        hadamard(80)


def test_outputs_are_compared_up_to_the_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) == 3
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1


def test_the_command_compares_answers_of_engines(model: Path, text: Path, tmp_path: Path, capsys) -> None:
    sections = {
        "scores": {"format": ["int8"], "sequences": 2, "length": 40},
        "answers": {
            "cpu_kv_dtype": ["int8"], "prompts": 2, "prompt_len": 20, "output_len": 8, "depths": 2, "context_len": 100,
        },
    }  # fmt: skip
    config = tmp_path / "quality.yaml"
    config.write_text(yaml.safe_dump(sections))
    assert quality.main(quality.Options(model=model, text=text, config=config, results_dir=tmp_path)) == 0
    printed = capsys.readouterr().out
    assert "MEASURED" in printed and "equal top token" in printed and "needles" in printed
    (figure,) = tmp_path.glob("quality/[0-9a-f]*/figure.png")
    assert figure.stat().st_size > 10_000
    (summary,) = tmp_path.glob("quality-answers/[0-9a-f]*/summary.json")
    (row,) = json.loads(summary.read_text())
    assert row["outputs"] == row["needles"] == 2 and 0 < row["first_difference"] <= 8


def test_a_text_that_is_too_short_is_refused(model: Path, text: Path) -> None:
    with pytest.raises(ValueError, match=r"give a longer --text"):
        token_sequences(read_text(text), model, 100, 1000)
