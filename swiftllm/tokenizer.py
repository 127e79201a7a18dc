"""Text to tokens and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
REPLACEMENT_CHARACTER = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """A thin wrapper over the tokenizer that transformers finds in a model folder."""

    def __init__(self, inner: Any) -> None:
        """``inner``: a transformers tokenizer."""
        self._inner = inner

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer | None:
        """The tokenizer of a model folder, or None where it has none.

        Raises:
            ValueError: its files are there and cannot be read; the message says why.
        """
        folder = Path(folder)
        if not any((folder / name).is_file() for name in TOKENIZER_FILES):
            return None
        from transformers import AutoTokenizer  # takes seconds, and engines fed with token ids do without

        try:
            return cls(AutoTokenizer.from_pretrained(folder, local_files_only=True))
        except Exception as error:  # transformers raises many kinds, some from compiled code
            raise ValueError(f"the tokenizer in {folder} cannot be read: {error}") from error

    @property
    def eos_token_id(self) -> int | None:
        return self._inner.eos_token_id

    @property
    def has_chat_template(self) -> bool:
        return self._inner.chat_template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """``add_special_tokens``: put what the model expects at the start (Llama: the begin-of-sequence token)."""
        return self._inner.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._inner.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Tokens of a conversation, ready for the assistant's answer; messages have ``role`` and ``content``.

        Raises:
            ValueError: the model has no chat template, or the template refuses the messages.
        """
        if not self.has_chat_template:
            raise ValueError("this model has no chat template: send a plain prompt to the completions endpoint")
        try:
            text = self._inner.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates are programs of the model's makers and raise what they like
            raise ValueError(f"the model's chat template refuses these messages: {error}") from error
        return self.encode(text, add_special_tokens=False)  # the template writes them itself

    def stream(self) -> TextStream:
        return TextStream(self)


class TextStream:
    """Text of a growing token sequence, piece by piece; all pieces together are the text of all tokens.

    A token may hold part of a character, and a decoder may write a token differently at the start of a text (Llama
    drops a leading space). So each piece is what the text of a short window gains over the text of the window
    without its new tokens, and nothing comes out while the last character is incomplete.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []  # tokens given out last, then the pending ones
        self._num_given = 0
        self._given_text = ""

    def push(self, token_ids: Sequence[int]) -> str:
        """Take new tokens, return what text is complete with them."""
        self._window.extend(token_ids)
        text = self._tokenizer.decode(self._window)
        if text.endswith(REPLACEMENT_CHARACTER):
            return ""
        piece = text[len(self._given_text) :]
        self._window = self._window[self._num_given :]
        self._num_given = len(self._window)
        self._given_text = self._tokenizer.decode(self._window)
        return piece

    def finish(self) -> str:
        """What is left at the end, an incomplete character as U+FFFD."""
        text = self._tokenizer.decode(self._window)
        piece = text[len(self._given_text) :]
        self._window, self._num_given, self._given_text = [], 0, ""
        return piece
