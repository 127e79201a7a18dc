"""From tokens to text: stop strings, held-back text, and that the grouping of tokens changes nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftllm.core.request import TokenLogprob
from swiftllm.model.tokenizer import Tokenizer
from swiftllm.server.answer_formats import ContentReader, ReasoningReader
from swiftllm.server.messages import Delta
from swiftllm.server.output_text import OutputText, ReadText, StopStrings
from swiftllm.server.tool_calls import Part, joined
from tests.reference.tiny_tokenizer import make_tiny_tokenizer

TEXTS = st.text("ab\n", max_size=30)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4)
EOS = 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.from_folder(make_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def grouped(token_ids, sizes):
    start = 0
    for size in sizes:
        yield token_ids[start : start + size]
        start += size
    yield token_ids[start:]


def cut(text, stops, include):
    """What a stop string leaves of a text, found by looking at ever longer beginnings of it."""
    for end in range(len(text) + 1):
        places = [(text.find(stop), stop) for stop in stops if stop in text[:end]]
        if places:
            place, stop = min(places, key=lambda found: found[0])
            return text[: place + len(stop) * include], stop
    return text, None


@given(TEXTS, STOPS, st.booleans())
def test_stop_strings_cut_where_the_first_of_them_ends(text, stops, include):
    checker = StopStrings(stops, include)
    given_out = ""
    for character in text:
        given_out += checker.push(character)
        if checker.found is not None:
            break
        assert text.startswith(given_out)
    else:
        given_out += checker.finish()
    assert (given_out, checker.found) == cut(text, stops, include)


@given(TEXTS, STOPS)
def test_text_is_held_back_only_while_a_stop_string_may_be_forming(text, stops):
    checker = StopStrings(stops, False)
    given_out = ""
    for end, character in enumerate(text, 1):
        given_out += checker.push(character)
        if checker.found is not None:
            return
        held = text[len(given_out) : end]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_the_first_of_two_stop_strings_at_one_place_counts():
    checker = StopStrings(["ab", "abc"], False)
    assert checker.push("xabc") == "x" and checker.found == "ab"


def take_all(output, deltas):
    text, logprobs = "", []
    for delta in deltas:
        piece = output.append_delta(delta)
        text += piece.text
        logprobs += piece.logprobs
        if piece.finish_reason is not None:
            return text, output.num_tokens, len(logprobs), piece.finish_reason, piece.stop_reason
    raise AssertionError("no end")


@given(st.data())
def test_how_tokens_are_grouped_changes_nothing(tokenizer, data):
    token_ids = data.draw(st.lists(st.integers(0, 120), min_size=1, max_size=40))
    stops = data.draw(st.lists(st.sampled_from(["th", "he", "an", "a", "é", "\ufffd"]), max_size=3))
    sizes = data.draw(st.lists(st.integers(0, 6), max_size=15))
    include, reason = data.draw(st.booleans()), data.draw(st.sampled_from(["stop", "length"]))
    if reason == "stop":
        token_ids.append(EOS)

    def run(groups):
        groups = [group for group in groups if group]
        output = OutputText(tokenizer, stops=stops, include_stops=include)
        return take_all(
            output,
            (
                Delta(
                    tuple(group),
                    tuple(TokenLogprob(token, -1.0) for token in group),
                    reason if number == len(groups) else None,
                )
                for number, group in enumerate(groups, 1)
            ),
        )

    one_by_one = run([token] for token in token_ids)
    assert run(grouped(token_ids, sizes)) == one_by_one
    text, num_tokens, num_logprobs, finish_reason, stop_reason = one_by_one
    assert num_tokens == num_logprobs
    if stop_reason is None:
        assert text == tokenizer.decode(token_ids) and num_tokens == len(token_ids) and finish_reason == reason


def test_half_characters_wait_for_their_other_half(tokenizer):
    token_ids = tokenizer.encode("a🍰é")
    assert len(token_ids) == 7
    output = OutputText(tokenizer)
    pieces = [output.append_delta(Delta((token,))).text for token in token_ids]
    assert pieces == ["a", "", "", "", "🍰", "", "é"]


def test_a_text_cut_within_a_character_says_so_at_the_end(tokenizer):
    token_ids = tokenizer.encode("a🍰")[:-1]
    output = OutputText(tokenizer)
    assert output.append_delta(Delta(tuple(token_ids), finish_reason="length")).text == "a\ufffd"


def test_bytes_that_are_no_text_do_not_pile_up(tokenizer):
    lead = tokenizer.encode("🍰")[0]
    stream = tokenizer.stream()
    pieces = [stream.push([lead]) for _ in range(500)]
    longest_wait = max(len(run) for run in "".join("x" if piece else "." for piece in pieces).split("x"))
    assert longest_wait < 10
    assert "".join(pieces) + stream.finish() == tokenizer.decode([lead] * 500) == "\ufffd" * 500


def test_special_tokens_show_only_when_asked_for(tokenizer):
    token_ids = (1, *tokenizer.encode("the"), EOS, *tokenizer.encode("inn"))
    assert OutputText(tokenizer).append_delta(Delta(token_ids, finish_reason="length")).text == "theinn"
    shown = OutputText(tokenizer, skip_special_tokens=False).append_delta(Delta(token_ids, finish_reason="length"))
    assert shown.text == "<s>the</s>inn"
    ended = OutputText(tokenizer, skip_special_tokens=False).append_delta(Delta(token_ids[:3], finish_reason="stop"))
    assert ended.text == "<s>the", "the token that ends an output is no part of it"


def test_a_stop_string_counts_from_the_token_after_the_least_number_of_tokens(tokenizer):
    """vLLM: stop strings are not looked for in the first ``min_tokens`` tokens, the last of them included."""
    a, b = tokenizer.encode("a"), tokenizer.encode("b")
    assert len(a) == len(b) == 1

    def text_of(tokens, min_tokens):
        output = OutputText(tokenizer, stops=["b"], min_tokens=min_tokens)
        return "".join(output.append_delta(Delta((token,))).text for token in tokens), output.num_tokens

    assert text_of([*a, *b, *a], 2) == ("aba", 3)
    assert text_of([*a, *b], 1) == ("a", 2)


def test_the_last_characters_of_a_text_may_complete_a_stop_string(tokenizer):
    """What an incomplete character adds at the end is text as any other."""
    token_ids = tokenizer.encode("ab🍰")[:-1]
    for stop, text in (("\ufffd", "ab"), ("b\ufffd", "a")):
        output = OutputText(tokenizer, stops=[stop])
        piece = output.append_delta(Delta(tuple(token_ids), finish_reason="length"))
        assert (piece.text, piece.finish_reason, piece.stop_reason) == (text, "stop", stop)


def test_the_stop_reason_is_a_token_that_was_asked_for(tokenizer):
    """vLLM: null where the model's own end token ended the output."""
    for token, reason in ((EOS, None), (7, 7)):
        piece = OutputText(tokenizer, stop_token_ids=[7, 9]).append_delta(Delta((5, token), finish_reason="stop"))
        assert (piece.finish_reason, piece.stop_reason) == ("stop", reason)
    cut = OutputText(tokenizer, stop_token_ids=[7]).append_delta(Delta((5, 7), finish_reason="length"))
    assert (cut.finish_reason, cut.stop_reason) == ("length", None)


def test_what_is_counted_of_tokens_does_not_depend_on_how_many_come_at_once(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("<think>I look</think>\nIt is so.")
    expected = [Part("reasoning", "I look"), Part("content", "\nIt is so.")]
    counts = set()
    for size in (1, 2, 5, len(tokens)):
        read = ReadText(OutputText(tokenizer), ReasoningReader(ContentReader(), has_begun=False))
        deltas = [Delta(tokens[i : i + size]) for i in range(0, len(tokens), size)]
        deltas[-1].finish_reason = "length"
        pieces = [read.append_delta(delta) for delta in deltas]
        assert joined(part for piece in pieces for part in piece.parts) == expected
        assert [token for piece in pieces for token in piece.token_ids] == tokens
        counts.add(sum(piece.num_reasoning_tokens for piece in pieces))
    assert len(counts) == 1 and 0 < counts.pop() < len(tokens)
