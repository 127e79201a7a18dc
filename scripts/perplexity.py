#!/usr/bin/env python3
"""Perplexity of model folders on one text, to see what 4-bit weights cost.

    scripts/perplexity.py ~/.cache/apex/models/SmolLM2-135M-Instruct /tmp/SmolLM2-awq

The text is the documentation of Python's standard library, or any file. It is cut into windows that do not overlap.
Perplexity is exp of the mean of -log p over all tokens but the first of each window.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from apex.workloads.requests import load_corpus
from swiftllm import LLM, SamplingParams


def perplexity(model: Path, text: str, window: int, num_windows: int, dtype: str) -> float:
    """Of the first ``num_windows`` windows of ``window`` tokens.

    Raises:
        ValueError: the text is shorter.
    """
    blocks = -(-(window + 1) // 16) + 1
    llm = LLM(model, dtype=dtype, num_gpu_blocks=blocks, num_cpu_blocks=0, max_model_len=window + 1)
    try:
        tokens = llm.engine.tokenizer.encode(text)
        if len(tokens) < window * num_windows:
            raise ValueError(f"the text has {len(tokens)} tokens, and {window * num_windows} are wanted")
        prompts = [tokens[start : start + window] for start in range(0, window * num_windows, window)]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0))
    finally:
        llm.close()
    logprobs = [entry.logprob for output in outputs for entry in output.prompt_logprobs]
    return math.exp(-sum(logprobs) / len(logprobs))


def main() -> None:
    parser = argparse.ArgumentParser(description="Perplexity of model folders on one text.")
    parser.add_argument("models", type=Path, nargs="+", help="Hugging Face folders with a tokenizer")
    parser.add_argument("--text", type=Path, help="file to read (default: documentation of Python's library)")
    parser.add_argument("--window", type=int, default=512, help="tokens of a window (default: %(default)s)")
    parser.add_argument("--num-windows", type=int, default=16, help="windows (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and activations (default: %(default)s)")
    arguments = parser.parse_args()
    text = arguments.text.read_text(encoding="utf-8") if arguments.text else load_corpus()
    for model in arguments.models:
        found = perplexity(model, text, arguments.window, arguments.num_windows, arguments.dtype)
        print(f"{found:8.3f}  {model}", flush=True)


if __name__ == "__main__":
    main()
