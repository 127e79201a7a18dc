"""How a format of the CPU tier changes what an engine answers, all decodes on the CPU: greedy texts, and a needle."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evaluation.experiments.quality.text import read_text, token_sequences
from swiftllm.core.request import SamplingParams
from swiftllm.llm import LLM
from swiftllm.model.tokenizer import Tokenizer

SYSTEM = "fastdecode"
"""Decodes all requests on the CPU."""
NEEDLE, QUESTION = "\nThe pass key is {key}. Remember it.\n", "\nThe pass key is"


@dataclass(frozen=True)
class AnswerTask:
    """Numbers of requests and lengths in tokens. A needle stands at each of ``depths`` places of its context."""

    model: Path
    cpu_kv_dtype: str
    prompts: int
    prompt_len: int
    output_len: int
    depths: int
    context_len: int
    text: Path | None = None


def answer_both(task: AnswerTask) -> dict[str, Any]:
    """What an engine with the exact tier and one with the other format answer, compared.

    ``equal_outputs``: share of greedy outputs that are the same; ``first_difference``: mean position of the first token
    that differs, the length where none does; ``needles_found`` and ``needles_found_exact``: of ``needles``.

    Raises:
        ValueError: the text is too short, or the format does not fit the model.
    """
    text, tokenizer = read_text(task.text), Tokenizer.from_folder(task.model)
    prompts = token_sequences(text, task.model, task.prompts, task.prompt_len)
    keys, haystacks = needles(task, tokenizer, token_sequences(text, task.model, task.depths, task.context_len))
    outputs, found = {}, {}
    for cpu_kv_dtype in ("auto", task.cpu_kv_dtype):
        with LLM(task.model, SYSTEM, device="cpu", cpu_kv_dtype=cpu_kv_dtype) as llm:
            greedy = SamplingParams(temperature=0.0, max_tokens=task.output_len, ignore_eos=True)
            outputs[cpu_kv_dtype] = [list(output.token_ids) for output in llm.generate(prompts, greedy)]
            answers = llm.generate(haystacks, replace(greedy, max_tokens=8))
            found[cpu_kv_dtype] = sum(key in output.text for key, output in zip(keys, answers, strict=True))
    firsts = [first_difference(*pair) for pair in zip(*outputs.values(), strict=True)]
    return {
        "outputs": len(firsts),
        "equal_outputs": sum(first == task.output_len for first in firsts) / len(firsts),
        "first_difference": sum(firsts) / len(firsts),
        "needles": len(keys),
        "needles_found_exact": found["auto"],
        "needles_found": found[task.cpu_kv_dtype],
        "text": text.name,
        "text_digest": text.digest,
    }


def needles(task: AnswerTask, tokenizer: Tokenizer, contexts: Sequence[list[int]]) -> tuple[list[str], list[list[int]]]:
    """Keys of five digits, and contexts that hold them, each at another depth, and end in the question."""
    chooser, keys, haystacks = random.Random(0), [], []
    question = tokenizer.encode(QUESTION, add_special_tokens=False)
    for place, context in enumerate(contexts):
        keys.append(str(chooser.randrange(10_000, 100_000)))
        needle = tokenizer.encode(NEEDLE.format(key=keys[-1]), add_special_tokens=False)
        kept = context[: task.context_len - len(needle) - len(question)]
        at = round(place / max(1, len(contexts) - 1) * len(kept))
        haystacks.append([*kept[:at], *needle, *kept[at:], *question])
    return keys, haystacks


def first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    """The first position where two equally long outputs differ; their length where they do not."""
    pairs = itertools.chain(zip(left, right, strict=True), [(None, 0)])
    return next(i for i, (a, b) in enumerate(pairs) if a != b)
