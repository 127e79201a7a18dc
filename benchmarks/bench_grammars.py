"""Compares the libraries for structured output on random JSON schemas, or serves these under every system.

Coverage, the time to compile a schema, and the time of one mask: libraries that are not installed are left out. With
`--serve` every system serves all schemas in tiny pools with a tiny model of random weights, with preemptions and
killed CPU workers, and what ends by itself is validated; with `--stream` as a server streams it. With `--masks` a
step's rows are sampled, some of which follow a grammar: what they cost the launching thread, on the host.

OMP_NUM_THREADS=1 python benchmarks/bench_grammars.py [--help]
"""

from __future__ import annotations

import importlib.util
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from rich.console import Console
from rich.table import Table

from apex.cli.options import parse_options
from swiftllm.files import cache_dir
from swiftllm.model.tokenizer import Tokenizer
from swiftllm.sampling.grammar import GrammarCompiler
from tests.reference.random_schemas import Schema, random_schema

SHOWN_REASONS = 8
MASKED_ROWS, MASKED_STEPS = 64, 40


@dataclass(frozen=True)
class Options:
    """Compare libraries for structured output on random JSON schemas."""

    schemas: int = 1000
    """How many."""
    refused: float = 0.1
    """Share of them with keywords that few libraries implement."""
    serve: bool = False
    """Serve them under every system instead."""
    stream: bool = False
    """Serve them over HTTP and validate the streams instead."""
    masks: bool = False
    """Show what grammars add to the sampling of a step instead."""
    model: Path = cache_dir() / "models" / "SmolLM2-135M-Instruct"
    """Its tokenizer is used."""
    seed: int = 0
    """Of schemas and outputs."""


class Guidance:
    """llguidance, as the server uses it."""

    name = "llguidance"

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos: int) -> None:
        self._compiler = GrammarCompiler(tokenizer, vocab_size, [eos])
        self._compiler.compile("choice", ["a"])

    def compile(self, schema: Schema) -> Any:
        return self._compiler.compile("json_schema", schema)

    def walk(self, compiled: Any, choose: Callable[[bytes], int], most: int, eos: int) -> tuple[list[int], list[float]]:
        progress, output, times_s = compiled.start(), [], []
        while len(output) < most and output[-1:] != [eos]:
            start_s = time.perf_counter()
            bits = progress.allowed(output)
            times_s.append(time.perf_counter() - start_s)
            output.append(choose(bits))
        return output, times_s


class XGrammar:
    """xgrammar, strict and with bounded blanks, as near to the server's rules as it goes."""

    name = "xgrammar"

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos: int) -> None:
        import xgrammar
        from transformers import AutoTokenizer

        self._library, self._vocab_size = xgrammar, vocab_size
        known = AutoTokenizer.from_pretrained(tokenizer.folder)
        info = xgrammar.TokenizerInfo.from_huggingface(known, vocab_size=vocab_size, stop_token_ids=[eos])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, schema: Schema) -> Any:
        return self._compiler.compile_json_schema(json.dumps(schema), any_whitespace=False, strict_mode=False)

    def walk(self, compiled: Any, choose: Callable[[bytes], int], most: int, eos: int) -> tuple[list[int], list[float]]:
        matcher, output, times_s = self._library.GrammarMatcher(compiled), [], []
        mask = self._library.allocate_token_bitmask(1, self._vocab_size)
        while len(output) < most and output[-1:] != [eos]:
            start_s = time.perf_counter()
            if output and not matcher.accept_token(output[-1]):
                raise RuntimeError("a token of the mask is not accepted")
            matcher.fill_next_token_bitmask(mask)
            times_s.append(time.perf_counter() - start_s)
            output.append(choose(mask.numpy().tobytes()))
        return output, times_s


def chooser(draw: random.Random, weights: list[int]) -> Callable[[bytes], int]:
    """Chooses the first allowed token in a random order, in which tokens of few bytes often come first."""
    import numpy as np

    lengths = np.array(weights, dtype=np.float64)

    def choose(bits: bytes) -> int:
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")[: len(lengths)])
        return int(draw.choices(allowed, 1.0 / lengths[allowed] ** 2)[0])

    return choose


def compare(options: Options, schemas: list[Schema], console: Console) -> None:
    import jsonschema

    tokenizer = Tokenizer.from_folder(options.model)
    vocab_size, eos = 49152, 2
    weights = [max(1, len(text or "")) for text in tokenizer.token_strings(range(vocab_size))]
    table = Table("library", "compile", "finished", "valid", "compile p50, p99, ms", "mask p50, p99, us")
    for library in (Guidance, XGrammar):
        if importlib.util.find_spec(library.name) is None:
            console.print(f"{library.name} is not installed")
            continue
        with_vocabulary = library(tokenizer, vocab_size, eos)
        choose, reasons, compile_s, mask_s = chooser(random.Random(options.seed), weights), Counter(), [], []
        num_finished = num_valid = 0
        for schema in schemas:
            start_s = time.perf_counter()
            try:
                compiled = with_vocabulary.compile(schema)
            except Exception as error:
                reasons[str(error).strip().splitlines()[-1][:90]] += 1
                continue
            compile_s.append(time.perf_counter() - start_s)
            output, times_s = with_vocabulary.walk(compiled, choose, 150, eos)
            mask_s += times_s
            if output[-1] == eos:
                num_finished += 1
                text = tokenizer.decode(output[:-1])
                try:
                    jsonschema.validate(json.loads(text), schema)
                    num_valid += 1
                except (jsonschema.ValidationError, ValueError, OverflowError) as error:  # 1e999 is infinite
                    reasons[f"INVALID: {str(error).splitlines()[0][:80]}"] += 1
        times = [
            f"{statistics.median(of):.3g}, {statistics.quantiles(of, n=100)[98]:.3g}"
            for of in ([s * 1e3 for s in compile_s], [s * 1e6 for s in mask_s])
        ]
        table.add_row(library.name, str(len(compile_s)), str(num_finished), str(num_valid), *times)
        console.print(
            library.name, *(f"  {count} {reason}" for reason, count in reasons.most_common(SHOWN_REASONS)), sep="\n"
        )
    console.print(table)


def serve(options: Options, schemas: list[Schema], console: Console) -> None:
    import logging

    from tests.apex.test_end_to_end import VARIANTS
    from tests.apex.test_schemas import is_taken, serve_schemas, stream_schemas
    from tests.reference.tiny_model import make_tiny_llama
    from tests.reference.tiny_tokenizer import make_tiny_tokenizer

    logging.disable(logging.ERROR)  # workers are killed on purpose
    with tempfile.TemporaryDirectory() as folder:
        model_dir = make_tiny_tokenizer(make_tiny_llama(folder))
        compiler = GrammarCompiler(Tokenizer.from_folder(model_dir), 128, [2])
        taken = [schema for schema in schemas if is_taken(compiler, schema)]
        console.print(f"{len(schemas)} schemas, {len(taken)} taken")
        for variant in VARIANTS:
            found, start_s = Counter[str](), time.perf_counter()
            of_variant = stream_schemas if options.stream else serve_schemas
            for start in range(0, len(taken), 50):
                found += of_variant(model_dir, variant, taken[start : start + 50], start, range(20, 400, 90))
            console.print(f"{variant}: {dict(found)} in {time.perf_counter() - start_s:.0f} s")


def sample_rows(options: Options, console: Console) -> None:
    """Print milliseconds of the thread's processor time, so that other processes count little."""
    import torch

    from swiftllm.core.request import Request, SamplingParams
    from swiftllm.sampling.sampler import Sampler

    torch.set_num_threads(1)
    vocab_size, eos, schema = 49152, 2, {"type": "array", "items": {"type": "string"}, "minItems": MASKED_STEPS}
    grammar = GrammarCompiler(Tokenizer.from_folder(options.model), vocab_size, [eos]).compile("json_schema", schema)
    logits, sampler = torch.randn(MASKED_ROWS, vocab_size), Sampler()
    for temperature in (0.0, 1.0):
        alone_ms = 0.0
        for num_ruled in (0, MASKED_ROWS // 4, MASKED_ROWS):
            how = [SamplingParams(1000, temperature=temperature, seed=0, grammar=g) for g in (grammar, None)]
            requests = [Request(str(row), (1,), how[row >= num_ruled]) for row in range(MASKED_ROWS)]
            times_s = []
            for _ in range(MASKED_STEPS):
                start_s = time.thread_time()
                tokens = sampler.sample(logits, requests)
                times_s.append(time.thread_time() - start_s)
                for request, token in zip(requests, tokens, strict=True):
                    request.output_token_ids.append(token)
            median_ms = 1e3 * statistics.median(times_s)
            alone_ms = alone_ms or median_ms
            line = (
                f"{num_ruled:2} of {MASKED_ROWS} rows with a grammar: {median_ms:6.2f} ms, {median_ms - alone_ms:+.2f}"
            )
            console.print(f"temperature {temperature:g}, {line}")


def main(options: Options) -> int:
    draw, console = random.Random(options.seed), Console()
    if options.masks:
        sample_rows(options, console)
        return 0
    schemas = [random_schema(draw, refused=options.refused) for _ in range(options.schemas)]
    (serve if options.serve or options.stream else compare)(options, schemas, console)
    return 0


if __name__ == "__main__":
    sys.exit(main(parse_options(Options)))
