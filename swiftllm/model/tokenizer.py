"""Text to tokens and back."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from swiftllm.model.folder import TOKENIZER_FILES, DamagedFile, is_there, read_object

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

TEMPLATE_FILE = "chat_template.json"  # of processors; transformers' tokenizers read all other places of templates
REPLACEMENT_CHARACTER = "\N{REPLACEMENT CHARACTER}"
LONG_TOKENS = 1000  # take a tenth of a millisecond to decode
MOST_NORMALIZED = 4  # characters that Unicode's composition joins to one
MILD_NORMALIZERS = {"Sequence", "NFC", "Prepend", "Replace", "String"}  # these delete nothing
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # in vocabularies without bytes for characters, such as Llama 2's
SINGLE_BYTE = re.compile("<0x([0-9A-F]{2})>")  # a token of these
MAX_PENDING_TOKENS = 8  # no character is cut into more: tokens that still give none are not text


def whole_texts(rust: RustTokenizer) -> RustTokenizer:
    """The same tokenizer, which neither cuts texts nor fills them up: a file keeps what its training did."""
    rust.no_truncation()
    rust.no_padding()
    return rust


def read_tokenizer(file: Path) -> RustTokenizer:
    """The tokenizer in a ``tokenizer.json`` alone, without the other files of its folder."""
    from tokenizers import Tokenizer as RustTokenizer

    try:
        return whole_texts(RustTokenizer.from_file(str(file)))
    except Exception as error:  # compiled code raises this very class
        raise DamagedFile(f"{file} is no tokenizer: {error}") from None


class Tokenizer:
    """A thin wrapper over the tokenizer that transformers finds in a model folder. Threads may share it.

    Texts go straight to the Rust tokenizer inside. Transformers' own layer takes five times as long for a token, and
    changes options of a tokenizer that other threads may be using.
    """

    def __init__(self, inner: Any, folder: str, vocab_size: float = math.inf) -> None:
        """``inner``: a fast tokenizer of transformers, as all of the Llama family are. ``folder``: where it is read.
        ``vocab_size``: of the model, which may have fewer: the tokens from there on never come."""
        from tokenizers.decoders import ByteLevel

        self._inner = inner
        self._vocab_size = vocab_size
        self.folder = folder
        self._rust = whole_texts(inner.backend_tokenizer)
        added = self._rust.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.joins_bytes = isinstance(self._rust.decoder, ByteLevel)
        self.text_alone = lru_cache(maxsize=None)(self._text_alone)  # bounded by the vocabulary
        self._added = frozenset(added)
        self._longest_token = self._most_chars()

    @classmethod
    def from_folder(cls, folder: str | Path, vocab_size: float = math.inf) -> Tokenizer | None:
        """The tokenizer of a model folder, or None where it has none. ``vocab_size``: the model's."""
        folder = Path(folder)
        if not any([is_there(folder / name) for name in TOKENIZER_FILES]):
            return None
        has_template_of_processor = is_there(folder / TEMPLATE_FILE)
        from transformers import AutoTokenizer  # takes seconds; engines fed with token ids do not need it

        try:
            inner = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            if inner.chat_template is None and has_template_of_processor:
                inner.chat_template = _templates(folder / TEMPLATE_FILE)
            return cls(inner, str(folder), vocab_size)
        except Exception as error:  # transformers raises many kinds, some from compiled code
            raise ValueError(f"the tokenizer in {folder} cannot be read: {error}") from error

    @property
    def eos_token_id(self) -> int | None:
        return self._inner.eos_token_id

    @property
    def has_chat_template(self) -> bool:
        return self._inner.chat_template is not None

    @property
    def chat_template(self) -> str:
        """The text of the model's chat template, of all if there are several; empty if it has none."""
        template = self._inner.chat_template
        return "".join(template.values()) if isinstance(template, dict) else template or ""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """``add_special_tokens``: put what the model expects at the start (Llama: the begin-of-sequence token)."""
        # The call for a batch lets other threads run meanwhile; the one for a single text does not.
        return self._rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if len(token_ids) > LONG_TOKENS:  # lets other threads run meanwhile, as in encode
            return self._rust.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0]
        return self._rust.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def _text_alone(self, token_id: int) -> str:
        """The text of this token with no other before it."""
        return self.decode((token_id,), skip_special_tokens=False)

    def _most_chars(self) -> float:
        """Characters of the longest token. Infinite where a token may stand for any number of characters."""
        model, normalizer = self._rust.model, self._rust.normalizer
        names_unknown = getattr(model, "unk_token", None) is not None and not getattr(model, "byte_fallback", False)
        takes_spaces = any(token.lstrip or token.rstrip for token in self._rust.get_added_tokens_decoder().values())
        steps = set() if normalizer is None else set(re.findall(r"(\w+)\(", repr(normalizer)))
        if type(model).__name__ != "BPE" or names_unknown or takes_spaces or not steps <= MILD_NORMALIZERS:
            return math.inf
        return max(map(len, self._rust.get_vocab())) * (MOST_NORMALIZED if steps else 1)

    def fewest_tokens(self, num_chars: int) -> int:
        """Tokens that a text of so many characters has at least."""
        return math.ceil(num_chars / self._longest_token)

    def written(self) -> str:
        """The tokenizer as JSON, in the form of ``tokenizer.json``, with the tokens alone that may come."""
        text = self._rust.to_str()
        if max(self._rust.get_vocab().values(), default=0) < self._vocab_size:
            return text
        whole = json.loads(text)
        whole["added_tokens"] = [token for token in whole["added_tokens"] if token["id"] < self._vocab_size]
        model = whole["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {token: number for token, number in model["vocab"].items() if number < self._vocab_size}
            known = model["vocab"].keys()
            if "merges" in model:
                model["merges"] = [pair for pair in model["merges"] if known >= {*pair, "".join(pair)}]
        return json.dumps(whole)

    def token_id(self, text: str) -> int | None:
        """The token that is written so in the vocabulary, if there is one that may come."""
        token = self._rust.token_to_id(text)
        return token if token is not None and token < self._vocab_size else None

    def texts(self) -> dict[int, str]:
        """The text of each token of the vocabulary that text is made of; U+FFFD stands for parts of characters."""
        tokens = self._rust.get_vocab(with_added_tokens=False).values()
        mine = (token for token in tokens if token not in self._added and token < self._vocab_size)
        return {token: self.token_text(token) for token in mine}

    def token_text(self, token_id: int) -> str:
        """The text of a token within others, its leading space included; U+FFFD stands for parts of characters."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token, which may be a part of a character. Ids outside the vocabulary have none."""
        string = self._rust.id_to_token(token_id) or ""
        if token_id in self._added or not string:
            return string.encode()
        if self.joins_bytes and byte_values().keys() >= set(string):
            return bytes(byte_values()[char] for char in string)
        byte = SINGLE_BYTE.fullmatch(string)
        return bytes.fromhex(byte[1]) if byte else string.replace(SPACE, " ").encode()

    def token_strings(self, token_ids: Sequence[int]) -> list[str | None]:
        """The tokens' strings in the vocabulary; None for ids that are not in it."""
        return [self._rust.id_to_token(token) for token in token_ids]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] = MappingProxyType({}),
        template: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The text of a conversation, by default ready for the assistant's answer; messages have ``role`` and
        ``content``. It has its special tokens already: encode it without adding any. ``continue_final_message`` ends it
        with the last message's content; a generation prompt does not go with that. ``variables`` are further inputs
        of the template; ``template`` is one to take in place of the model's; ``tools`` have OpenAI's form.

        Raises:
            ValueError: the model has no chat template, or the template refuses the messages.
        """
        if template is None and not self.has_chat_template:
            raise ValueError("this model has no chat template: send a plain prompt to the completions endpoint")
        if variables and (taken := inspect.signature(self._inner.apply_chat_template).parameters.keys() & variables):
            raise ValueError(f"variables of the chat template cannot be called {', '.join(sorted(taken))}")
        try:
            return self._inner.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=template,
                tools=list(tools) or None,
                **variables,
            )
        except Exception as error:  # templates are programs that come with the model and raise anything
            raise ValueError(f"the model's chat template refuses these messages: {error}") from error

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Tokens of a conversation, ready for the assistant's answer; raises what :meth:`render_chat` raises."""
        return self.encode(self.render_chat(messages), add_special_tokens=False)

    def stream(self, skip_special_tokens: bool = True) -> TextStream:
        return TextStream(self, skip_special_tokens)


def _templates(file: Path) -> str | dict[str, str]:
    """What ``chat_template.json`` holds: a template, or several with names."""
    given = read_object(file).get("chat_template")
    if isinstance(given, list) and all(isinstance(one, Mapping) for one in given):
        given = {one.get("name"): one.get("template") for one in given}
    texts = given.values() if isinstance(given, dict) else [given]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise DamagedFile(f"{file} has no chat_template")
    return given


@cache
def byte_values() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {char: byte for byte, char in bytes_to_unicode().items()}


class TextStream:
    """Text of a growing token sequence, piece by piece; all pieces together are the text of all tokens.

    A token may hold part of a character, and a decoder may write a token differently at the start of a text (Llama
    drops a leading space). So each piece is the difference between the texts of a short window with and without its new
    token. No piece is returned while the last character is incomplete. The grouping of tokens into pushes does not
    matter, and the cost of a push does not grow with the text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._window: list[int] = []  # tokens given out last, then the pending ones
        self._num_given_tokens = 0
        self._num_given_chars = 0
        self._is_complete = True  # nothing is pending

    def push(self, token_ids: Sequence[int]) -> str:
        """Append tokens; returns the text that they complete."""
        return "".join([self._push(token) for token in token_ids if token not in self._skipped])

    def _push(self, token_id: int) -> str:
        alone = self._tokenizer.text_alone(token_id)
        if self._is_complete and self._tokenizer.joins_bytes and REPLACEMENT_CHARACTER not in alone:  # the rule
            self._window, self._num_given_tokens, self._num_given_chars = [token_id], 1, len(alone)
            return alone
        window = self._window
        window.append(token_id)
        text = self._tokenizer.decode(window, skip_special_tokens=False)  # tokens to skip never enter the window
        num_pending_chars = 0
        self._is_complete = not text.endswith(REPLACEMENT_CHARACTER)
        if not self._is_complete:
            if len(window) - self._num_given_tokens < MAX_PENDING_TOKENS:
                return ""
            num_pending_chars = 1  # bytes that make no characters; the last of them may begin one
        piece = text[self._num_given_chars : len(text) - num_pending_chars]
        del window[: self._num_given_tokens]
        self._num_given_tokens = len(window)
        given = alone if len(window) == 1 else self._tokenizer.decode(window, skip_special_tokens=False)
        self._num_given_chars = len(given) - num_pending_chars
        return piece

    def finish(self) -> str:
        """The rest of the text, an incomplete character as U+FFFD."""
        piece = self._tokenizer.decode(self._window, skip_special_tokens=False)[self._num_given_chars :]
        self._window, self._num_given_tokens, self._num_given_chars, self._is_complete = [], 0, 0, True
        return piece
