"""`apex generate`: complete prompts and print the texts."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import tyro

from apex.cli.options import (
    SYSTEM_HELP,
    ConfigFile,
    EngineFlags,
    ModelName,
    ProfileFile,
    SamplingFlags,
    StrategyFlags,
    SystemName,
    running_engine,
)
from apex.cli.output import InputError, input_errors
from apex.progress import progress_bar

if TYPE_CHECKING:
    from swiftllm.core.request import RequestOutput
    from swiftllm.engine.engine import Engine


@dataclass(frozen=True)
class Generate(ConfigFile):
    """Complete prompts and print the texts.

    For example:

      apex generate MODEL "The capital of France is"
      apex generate MODEL --chat --max-tokens 100 "Why is the sky blue?"
      apex generate MODEL --temperature 0.8 --system neo < prompts.txt

    In a source tree `make setup` puts a small model at ~/.cache/apex/models/SmolLM2-135M-Instruct.
    """

    model: ModelName
    """A Hugging Face folder, or a name on its hub such as meta-llama/Llama-3.1-8B."""
    prompts: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="PROMPT ...")] = ()
    """Texts to complete; by default one per line of standard input."""
    system: Annotated[
        SystemName, tyro.conf.arg(help=f"{SYSTEM_HELP} Where one has targets, prompts queue whatever these are.")
    ] = "apex"
    chat: bool = False
    """Send each prompt as a user's message, in the model's chat template."""
    profile: ProfileFile = None
    """Profile table to use; by default the cached one, measured on the first start."""
    sampling: SamplingFlags = field(default_factory=SamplingFlags)
    engine: EngineFlags = field(default_factory=EngineFlags)
    strategy: StrategyFlags = field(default_factory=StrategyFlags)

    def run(self) -> int:
        prompts = self.prompts or read_lines()
        check_text(prompts)
        with input_errors():
            sampling = self.sampling.checked()
            config, strategy = self.engine.config(self.model), self.strategy.config(self.system)
        with running_engine(self.system, config, strategy, self.profile) as engine:
            with input_errors():
                for index, prompt in enumerate(encode(engine, prompts, self.chat)):
                    engine.add(engine.make_request(str(index), prompt, sampling), check_targets=False)
            start_s = engine.now()
            num_tokens = self._print_one(engine) if len(prompts) == 1 else self._print_all(engine, prompts)
            seconds = engine.now() - start_s
            print(f"{num_tokens} tokens in {seconds:.1f} s: {num_tokens / seconds:.1f} tokens/s", file=sys.stderr)
        return 0

    def _print_one(self, engine: Engine) -> int:
        """Print the only output as it is generated."""
        assert engine.tokenizer is not None, "prompts are texts"
        stream, done = engine.tokenizer.stream(), 0
        for output in outputs_of(engine):
            print(stream.push(output.new_token_ids), end="", flush=True)
            done += len(output.new_token_ids)
        print(stream.finish())
        return done

    def _print_all(self, engine: Engine, prompts: Sequence[str]) -> int:
        """Print all outputs at the end, each below its prompt."""
        assert engine.tokenizer is not None, "prompts are texts"
        total, done, texts = len(prompts) * self.sampling.max_tokens, 0, {}
        with progress_bar("generating") as report:
            for output in outputs_of(engine):
                done += len(output.new_token_ids)
                report(done / total, f"{done} tokens")
                if output.finished:
                    texts[output.request_id] = engine.tokenizer.decode(output.token_ids)
        for index, prompt in enumerate(prompts):
            print(f"{'' if index == 0 else chr(10)}>>> {prompt}\n{texts[str(index)]}")
        return done


def read_lines() -> tuple[str, ...]:
    """The lines of standard input that are not blank, as prompts, whatever system wrote their ends."""
    text = "" if sys.stdin.isatty() else decoded(sys.stdin.buffer.read(), sys.stdin.encoding)
    prompts = tuple(line for line in re.split(r"\r\n|\r|\n", text) if line.strip())
    if not prompts:
        raise InputError("no prompt: give one or more as arguments, or one per line on standard input")
    return prompts


def decoded(text: bytes, encoding: str) -> str:
    """UTF-8, maybe with a byte-order mark, where a text is that; else what ``encoding`` makes of it."""
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError:
        return text.decode(encoding, "surrogateescape")


def check_text(prompts: Sequence[str]) -> None:
    """Refuse a prompt of bytes that are not UTF-8, which Python reads as lone surrogates."""
    for prompt in prompts:
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise InputError(f"the prompt {prompt!r} is not UTF-8") from None


def encode(engine: Engine, prompts: Sequence[str], chat: bool) -> list[list[int]]:
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise ValueError("the model folder has no tokenizer (tokenizer.json): text can be neither read nor written")
    if chat:
        return [tokenizer.apply_chat_template([{"role": "user", "content": prompt}]) for prompt in prompts]
    return [tokenizer.encode(prompt) for prompt in prompts]


def outputs_of(engine: Engine) -> Iterator[RequestOutput]:
    """Run the engine until all requests have ended."""
    while engine.has_unfinished():
        yield from engine.step()
