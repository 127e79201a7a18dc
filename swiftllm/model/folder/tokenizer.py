"""Text to tokens and back."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
REPLACEMENT_CHARACTER = "\N{REPLACEMENT CHARACTER}"
LONG_TOKENS = 1000  # take a tenth of a millisecond to decode
MOST_NORMALIZED = 4  # characters that Unicode's composition joins to one
MILD_NORMALIZERS = {"Sequence", "NFC", "Prepend", "Replace", "String"}  # these delete nothing
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # in vocabularies without bytes for characters, such as Llama 2's
SINGLE_BYTE = re.compile("<0x([0-9A-F]{2})>")  # a token of these
MAX_PENDING_TOKENS = 8  # no character is cut into more: tokens that still give none are not text


class Tokenizer:
    """A thin wrapper over the tokenizer that transformers finds in a model folder. Threads may share it.

    Texts go straight to the Rust tokenizer inside. Transformers' own layer takes five times as long for a token, and
    changes options of a tokenizer that other threads may be using.
    """

    def __init__(self, inner: Any, folder: str) -> None:
        """``inner``: a fast tokenizer of transformers, as all of the Llama family are. ``folder``: where it is read."""
        from tokenizers.decoders import ByteLevel

        self._inner = inner
        self.folder = folder
        self._rust = inner.backend_tokenizer
        added = self._rust.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.joins_bytes = isinstance(self._rust.decoder, ByteLevel)
        self.text_alone = lru_cache(maxsize=None)(self._text_alone)  # bounded by the vocabulary
        self._added = frozenset(added)
        self._longest_token = self._most_chars()

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer | None:
        """The tokenizer of a model folder, or None where it has none.

        Raises:
            ValueError: its files exist and cannot be read; the message says why.
        """
        folder = Path(folder)
        if not any((folder / name).is_file() for name in TOKENIZER_FILES):
            return None
        from transformers import AutoTokenizer  # takes seconds; engines fed with token ids do not need it

        try:
            return cls(AutoTokenizer.from_pretrained(folder, local_files_only=True), str(folder))
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
        """The tokenizer as JSON, in the form of ``tokenizer.json``."""
        return self._rust.to_str()

    def token_id(self, text: str) -> int | None:
        """The token that is written so in the vocabulary, if there is one."""
        return self._rust.token_to_id(text)

    def texts(self) -> dict[int, str]:
        """The text of each token of the vocabulary that text is made of; U+FFFD stands for parts of characters."""
        tokens = self._rust.get_vocab(with_added_tokens=False).values()
        return {token: self.token_bytes(token).decode(errors="replace") for token in tokens if token not in self._added}

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
