import random

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from swiftllm.model.folder.tokenizer import Tokenizer

TEXT = "The naïve café sells 🍰 and 日本茶 for 3 €, says 👩‍🔬.\n  Two spaces."
MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def bytes_folder(tmp_path_factory):
    """Every byte is a token: each character beyond ASCII comes in pieces."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = RawTokenizer(models.BPE({c: i for i, c in enumerate(alphabet)} | {"<eos>": 256}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("bytes")
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["bytes_folder", "smollm2_dir"])
def tokenizer(request):
    return Tokenizer.from_folder(request.getfixturevalue(request.param))


def pieces(tokenizer, token_ids, sizes):
    stream, parts, start = tokenizer.stream(), [], 0
    while start < len(token_ids):
        size = next(sizes)
        parts.append(stream.push(token_ids[start : start + size]))
        start += size
    return parts, stream.finish()


def test_round_trip(tokenizer):
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


@pytest.mark.parametrize("seed", range(5))
def test_streamed_pieces_are_whole_characters_and_add_up(tokenizer, seed):
    rng = random.Random(seed)
    sizes = iter(lambda: 1 if seed == 0 else rng.randint(1, 4), 0)
    parts, rest = pieces(tokenizer, tokenizer.encode(TEXT), sizes)
    assert "".join(parts) == TEXT and rest == ""
    assert not any("\ufffd" in part for part in parts)


def test_a_text_that_ends_within_a_character_keeps_it_for_the_end(bytes_folder):
    tokenizer = Tokenizer.from_folder(bytes_folder)
    parts, rest = pieces(tokenizer, tokenizer.encode("a🍰")[:-1], iter(lambda: 1, 0))
    assert parts == ["a", "", "", ""] and rest == "\ufffd"


def test_random_tokens_add_up_too(tokenizer):
    rng = random.Random(3)
    token_ids = [rng.randrange(256) for _ in range(300)]
    parts, rest = pieces(tokenizer, token_ids, iter(lambda: 1, 0))
    assert "".join(parts) + rest == tokenizer.decode(token_ids)


def test_special_tokens_are_left_out_unless_asked_for(bytes_folder):
    tokenizer = Tokenizer.from_folder(bytes_folder)
    token_ids = [*tokenizer.encode("hi"), tokenizer.eos_token_id]
    assert tokenizer.decode(token_ids) == "hi"
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == "hi<eos>"


def test_chat_template(smollm2_dir):
    tokenizer = Tokenizer.from_folder(smollm2_dir)
    text = tokenizer.decode(tokenizer.apply_chat_template(MESSAGES), skip_special_tokens=False)
    assert text.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")


def test_no_chat_template_is_said(bytes_folder):
    tokenizer = Tokenizer.from_folder(bytes_folder)
    assert not tokenizer.has_chat_template
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.apply_chat_template(MESSAGES)


def test_a_folder_without_tokenizer_gives_none(tiny_model_dir):
    assert Tokenizer.from_folder(tiny_model_dir()) is None


def test_a_damaged_tokenizer_is_an_error_not_none(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        Tokenizer.from_folder(tmp_path)


def test_a_whole_character_after_bytes_that_make_none_is_kept(bytes_folder):
    """Text waits for the end of a character for 8 tokens. The last of these may begin a good one."""
    tokenizer = Tokenizer.from_folder(bytes_folder)
    cake = tokenizer.encode("🍰")
    for lead_bytes in range(5, 10):
        token_ids = [cake[0]] * lead_bytes + cake
        parts, rest = pieces(tokenizer, token_ids, iter(lambda: 1, 0))
        assert "".join(parts) + rest == "\ufffd" * lead_bytes + "🍰" == tokenizer.decode(token_ids)
