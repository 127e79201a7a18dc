"""A process that tries grammars of clients before the server takes them.

Some take minutes and gigabytes (``multipleOf`` of a large prime), and a compilation cannot be stopped from within.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from swiftllm.sampling.grammar import MAX_CACHED, Kind, Progress, compiled, text_of, vocabulary_of

if TYPE_CHECKING:
    from swiftllm.model.tokenizer import Tokenizer

MAX_CPU_S = 1.0
"""Of the process that tries a grammar, for compiling it and for its first mask."""


class TriedGrammar(NamedTuple):
    """A grammar that compiles. ``source``: its kind and text, for a compiler in another process."""

    source: tuple[Kind, str]


class GrammarTrials:
    """Tries grammars for one vocabulary, one at a time, and keeps the last outcomes. Threads may share it.

    The process starts with the first grammar, and again after one that was too much for it.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, list(eos_token_ids)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._errors: OrderedDict[tuple[Kind, str], str] = OrderedDict()

    def check(self, kind: Kind, source: Any) -> TriedGrammar:
        """The grammar of ``source``, as :meth:`GrammarCompiler.compile` takes it. Takes milliseconds, at most about
        ``MAX_CPU_S``; the first one a second.

        Raises:
            ValueError: it is no such grammar, or is too large; the message says where.
        """
        key = kind, text_of(source)
        error = self._errors.get(key)
        if error is None:
            with self._lock:
                error = self._errors.pop(key, None)
                self._errors[key] = error = self._try(*key) if error is None else error
                if len(self._errors) > MAX_CACHED:
                    self._errors.popitem(last=False)
        if error:
            raise ValueError(error)
        return TriedGrammar(key)

    def _try(self, kind: Kind, text: str) -> str:
        """What is wrong with a grammar; "" if nothing is."""
        if self._process is None:
            self._process = self._start()
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps([kind, text]) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if answer:
            return json.loads(answer)
        self._process = None
        if process.wait() == -signal.SIGPROF:
            return f"it takes more than {MAX_CPU_S:.0f} s of CPU time to compile"
        return "it cannot be compiled"

    def _start(self) -> subprocess.Popen[str]:
        root = str(Path(__file__).resolve().parents[2])
        process = subprocess.Popen(
            [sys.executable, "-m", "swiftllm.sampling.trial"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": root},
            start_new_session=True,  # Ctrl-C is not for it
        )
        weakref.finalize(self, end, process)
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # then the answer to the grammar will be missing
            process.stdin.write(json.dumps([self._tokenizer.written(), self._vocab_size, self._eos]) + "\n")
        return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def main() -> None:
    """The process: a line of JSON with the vocabulary, then one a grammar; answers with a line each. It ends with its
    input. SIGPROF ends it where a grammar takes too long."""
    vocabulary = vocabulary_of(*json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
        try:
            Progress(compiled(vocabulary, *json.loads(line))).allowed(())
            error = ""
        except Exception as raised:
            error = str(raised) or "it cannot be compiled"
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(error), flush=True)


if __name__ == "__main__":
    main()
