"""Complete prompts in this process, with a part of the KV cache in host memory.

.venv/bin/python examples/offline.py [MODEL]

MODEL is a Hugging Face folder or a name on its hub; by default the 135M-parameter model that `make setup` prepares.
"""

import sys
from pathlib import Path

from swiftllm import SamplingParams
from swiftllm.files import cache_dir
from swiftllm.llm import LLM

MODEL = cache_dir() / "models/SmolLM2-135M-Instruct"
PROMPTS = ["The capital of France is", "Once upon a time", "The three primary colours are", "Water boils at"]


def main(model: str | Path = MODEL) -> None:
    # Four blocks of 16 tokens hold the KV cache of two of these requests. That of the others is kept in host memory,
    # and the CPU computes their attention.
    with LLM(model, system="apex", num_gpu_blocks=4, num_cpu_blocks=1000) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=24))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        print(f"{prompt} ->{output.text!r} ({output.finish_reason})")


if __name__ == "__main__":
    main(*sys.argv[1:])
