"""The text whose tokens are predicted: a file, or one that every Python has."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from swiftllm.model.tokenizer import Tokenizer

DEFAULT_TEXT = "Python's language reference (pydoc_data.topics)"


@dataclass(frozen=True)
class Text:
    """A text, its name, and a digest of it."""

    name: str
    content: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.content.encode()).hexdigest()[:16]


def read_text(path: Path | None) -> Text:
    """The text of a file, by default the topics of Python's own help, in English.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if path is not None:
        return Text(path.name, path.read_text(encoding="utf-8"))
    from pydoc_data.topics import topics

    return Text(DEFAULT_TEXT, "\n".join(topics[name] for name in sorted(topics)))


def token_sequences(text: Text, model: Path, number: int, length: int) -> list[list[int]]:
    """So many stretches of the text that do not overlap, ``length`` tokens each, spread evenly over it.

    Raises:
        ValueError: the model folder has no tokenizer, or the text is too short.
    """
    tokenizer = Tokenizer.from_folder(model)
    if tokenizer is None:
        raise ValueError(f"{model} has no tokenizer")
    tokens = tokenizer.encode(text.content, add_special_tokens=False)
    if len(tokens) < number * length:
        raise ValueError(
            f"{text.name} has {len(tokens)} tokens, and {number} sequences of {length} need {number * length}: "
            "give a longer --text"
        )
    stride = len(tokens) // number
    return [tokens[i * stride : i * stride + length] for i in range(number)]
