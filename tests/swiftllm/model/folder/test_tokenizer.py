import json
import random
import shutil

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from swiftllm.model.tokenizer import Tokenizer, read_tokenizer

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


@pytest.fixture
def copy(bytes_folder, tmp_path):
    """A copy of the folder, in which texts may be written over files."""

    def copy(**texts):
        folder = shutil.copytree(bytes_folder, tmp_path / "model")
        for name, text in texts.items():
            stem, _, end = name.rpartition("_")
            file = folder / f"{stem.replace('__', '/')}.{end}"
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
        return folder

    return copy


def test_truncation_and_padding_of_the_training_apply_to_no_text(copy):
    """As in transformers, where a call without arguments does neither."""
    folder = copy()
    raw = RawTokenizer.from_file(str(folder / "tokenizer.json"))
    raw.enable_truncation(16)
    raw.enable_padding(length=16, pad_id=256, pad_token="<eos>")
    raw.save(str(folder / "tokenizer.json"))
    judge, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)
    alone = read_tokenizer(folder / "tokenizer.json")
    for text in ("n" * 101, "abc"):
        assert ours.encode(text) == alone.encode(text).ids == judge(text)["input_ids"]
        assert len(ours.encode(text)) == len(text)
    assert [len(found.ids) for found in alone.encode_batch(["n" * 101, "abc"])] == [101, 3]


def test_a_file_that_is_no_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is no tokenizer"):
        read_tokenizer(tmp_path / "tokenizer.json")


TEMPLATE = "{% for message in messages %}<NAME>{{ message.content }}{% endfor %}"


def template(name):
    return TEMPLATE.replace("NAME", name)


NAMED = [{"name": name, "template": template(name)} for name in ("default", "tool_use")]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


def in_config(given):
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "chat_template": given}
    return {"tokenizer_config_json": json.dumps(fields)}


JINJA = {"chat_template_jinja": template("jinja")}
PROCESSORS = {"chat_template_json": json.dumps({"chat_template": template("processor")})}
FURTHER = {"additional_chat_templates__tool_use_jinja": template("further")}


@pytest.mark.parametrize(
    ("files", "plain", "with_tools"),
    [
        (in_config(template("config")), "config", "config"),
        (in_config(NAMED), "default", "tool_use"),
        (in_config(template("config")) | JINJA, "jinja", "jinja"),
        (in_config(template("config")) | JINJA | FURTHER, "jinja", "further"),
        (in_config(template("config")) | PROCESSORS, "config", "config"),
        (JINJA | PROCESSORS, "jinja", "jinja"),
    ],
)
def test_of_several_templates_the_one_of_transformers_counts(copy, files, plain, with_tools):
    folder = copy(**files)
    judge, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)
    assert ours.render_chat(MESSAGES) == judge.apply_chat_template(MESSAGES, tokenize=False) == f"<{plain}>Hello"
    assert ours.render_chat(MESSAGES, tools=TOOLS) == f"<{with_tools}>Hello"
    assert judge.apply_chat_template(MESSAGES, tools=TOOLS, tokenize=False) == f"<{with_tools}>Hello"


@pytest.mark.parametrize(
    ("given", "plain", "with_tools"),
    [
        (template("processor"), "processor", "processor"),
        (NAMED, "default", "tool_use"),
        ({one["name"]: one["template"] for one in NAMED}, "default", "tool_use"),
    ],
)
def test_a_template_that_the_processors_file_alone_has_is_read(copy, given, plain, with_tools):
    """transformers' processors read chat_template.json, its tokenizers do not; vLLM asks the processor."""
    ours = Tokenizer.from_folder(copy(chat_template_json=json.dumps({"chat_template": given})))
    assert ours.has_chat_template and f"<{plain}>" in ours.chat_template
    assert ours.render_chat(MESSAGES) == f"<{plain}>Hello"
    assert ours.render_chat(MESSAGES, tools=TOOLS) == f"<{with_tools}>Hello"


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"chat_template": 3}', '{"chat_template": []}'])
def test_a_processors_file_without_a_template_is_named(copy, text):
    with pytest.raises(ValueError, match=r"chat_template\.json"):
        Tokenizer.from_folder(copy(chat_template_json=text))


@pytest.fixture
def blocks(tmp_path):
    """Like Llama 2's tokenizer: a block stands for a space, and its decoder drops the first one of a text."""
    words = {"\u2581": 1, "t": 2, "h": 3, "\u2581t": 4, "\u2581th": 5, "<0xC3>": 6, "<0xA9>": 7}
    merges = [("\u2581", "t"), ("\u2581t", "h")]
    raw = RawTokenizer(models.BPE({"<unk>": 0, **words}, merges, unk_token="<unk>", byte_fallback=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    raw.decoder = decoders.Sequence(list(steps))
    raw.add_special_tokens([AddedToken("<unk>", special=True), AddedToken("</s>", special=True)])
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>").save_pretrained(tmp_path)
    return Tokenizer.from_folder(tmp_path)


def test_a_tokens_text_keeps_its_space(blocks):
    """OpenAI: the tokens of log-probabilities, joined, are the content."""
    tokens = blocks.encode("th th t")
    assert "".join(map(blocks.token_text, tokens)) == " th th t"
    assert blocks.decode(tokens) == "th th t"
    assert [blocks.token_text(token) for token in (6, blocks.eos_token_id, 1000)] == ["\ufffd", "</s>", ""]


def test_tokens_beyond_the_models_vocabulary_are_none(copy):
    folder = copy()
    raw = RawTokenizer.from_file(str(folder / "tokenizer.json"))
    raw.add_special_tokens([AddedToken("[PAD]", special=True)])
    raw.save(str(folder / "tokenizer.json"))
    whole, cut = Tokenizer.from_folder(folder), Tokenizer.from_folder(folder, 257)
    assert (whole.token_id("[PAD]"), cut.token_id("[PAD]"), cut.token_id("<eos>")) == (257, None, 256)
    assert [token["id"] for token in json.loads(cut.written())["added_tokens"]] == [256]
    assert json.loads(whole.written()) == json.loads(raw.to_str())
    few = Tokenizer.from_folder(folder, 100)
    assert max(few.texts()) == 99 and few.texts().items() <= whole.texts().items()
    assert max(json.loads(few.written())["model"]["vocab"].values()) == 99


def test_merges_into_tokens_beyond_the_models_vocabulary_go_too(blocks):
    cut = Tokenizer(blocks._inner, blocks.folder, 5)  # without the last merge
    assert json.loads(cut.written())["model"]["merges"] == [["\u2581", "t"]]
    assert RawTokenizer.from_str(cut.written()).get_vocab_size() == 5


def test_a_whole_character_after_bytes_that_make_none_is_kept(bytes_folder):
    """Text waits for the end of a character for 8 tokens. The last of these may begin a good one."""
    tokenizer = Tokenizer.from_folder(bytes_folder)
    cake = tokenizer.encode("🍰")
    for lead_bytes in range(5, 10):
        token_ids = [cake[0]] * lead_bytes + cake
        parts, rest = pieces(tokenizer, token_ids, iter(lambda: 1, 0))
        assert "".join(parts) + rest == "\ufffd" * lead_bytes + "🍰" == tokenizer.decode(token_ids)
