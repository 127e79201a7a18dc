"""Defaults of requests from generation_config.json: the fields that vLLM 0.33 reads (``get_diff_sampling_param``). What
makes no sense stops no start."""

from __future__ import annotations

import json

import pytest

from swiftllm.model.folder import sampling_defaults

AUTHORS = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}


@pytest.fixture
def read(tmp_path):
    def read(given: object) -> dict[str, float]:
        (tmp_path / "generation_config.json").write_text(given if isinstance(given, str) else json.dumps(given))
        return sampling_defaults(tmp_path)

    return read


def test_those_that_vllm_reads_are_read(read, tmp_path, caplog):
    assert sampling_defaults(tmp_path) == {}
    neutral = {"num_beams": 1, "typical_p": 1.0, "stop_strings": None, "do_sample": True, "eos_token_id": 2}
    assert read(AUTHORS | neutral | {"max_new_tokens": 7}) == AUTHORS | {"max_tokens": 7}
    assert read(dict.fromkeys(AUTHORS)) == {}
    assert not caplog.messages


@pytest.mark.parametrize("top_k", [-1, 0, -1.0])
def test_these_mean_all_tokens(read, caplog, top_k):
    """-1 in vLLM, 0 in vLLM and transformers."""
    assert read({"top_k": top_k}) == {} and not caplog.messages


def test_whole_numbers_may_have_a_point(read):
    assert read({"top_k": 40.0, "max_new_tokens": 8.0}) == {"top_k": 40, "max_tokens": 8}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", ["-1", '"0.7"', "true", "Infinity", "NaN", "[0.5]"]),
        ("top_p", ["0", "1.5", "{}", "NaN"]),
        ("top_k", ["-2", "1.5", '"50"', "false", "1e400"]),
        ("min_p", ["-0.1", "2"]),
        ("repetition_penalty", ["0", "-1.0", '"1"']),
        ("max_new_tokens", ["0", "-1", "2.5", '"many"', "true"]),
    ],
)
def test_a_value_that_makes_no_sense_is_left_aside_with_a_word(read, tmp_path, caplog, name, values):
    for number, value in enumerate(values, 1):
        assert read(f'{{"top_p": 0.25, "{name}": {value}}}') == ({} if name == "top_p" else {"top_p": 0.25})
        assert len(caplog.messages) == number and f"generation_config.json: {name} is left aside" in caplog.text


@pytest.mark.parametrize("text", ["{", "5", "", "\0"])
def test_a_file_that_is_no_json_is_left_aside_with_a_word(read, caplog, text):
    assert read(text) == {}
    assert "generation_config.json" in caplog.text and "left aside" in caplog.text


def test_what_other_engines_would_follow_is_said(read, caplog):
    assert read({"num_beams": 4, "no_repeat_ngram_size": 3, "top_k": 5}) == {"top_k": 5}
    (message,) = caplog.messages
    assert "generation_config.json: num_beams, no_repeat_ngram_size not followed" in message
