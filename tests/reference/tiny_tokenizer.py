"""A tokenizer of 128 tokens for the tiny models: characters, halves of characters, a few longer pieces."""

from __future__ import annotations

import string
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<s>", "</s>")
PLAIN = string.ascii_letters + string.digits + string.punctuation + " \n"
BEYOND_ASCII = "é€日🍰"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ('system', 'user', 'assistant') %}{{ raise_exception('no such role') }}{% endif %}"
    "<s>{{ message.role }}: {{ message.content }}</s>\n"
    "{% endfor %}{% if add_generation_prompt %}<s>assistant:{{ thoughts }}{% endif %}"
)


def make_tiny_tokenizer(path: str | Path, *, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Write the tokenizer to ``path`` and return it; all its special tokens come first, end-of-sequence is token 2."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    symbols = [byte_level.pre_tokenize_str(text)[0][0] for text in (*PLAIN, *BEYOND_ASCII)]
    alphabet = list(dict.fromkeys("".join(symbols)))
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *alphabet))}
    merges = [("t", "h"), ("th", "e"), ("i", "n"), ("a", "n"), ("e", "r"), ("o", "n"), ("r", "e")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    assert len(vocabulary) <= 128
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.chat_template = chat_template
    fast.save_pretrained(path)
    return Path(path)
