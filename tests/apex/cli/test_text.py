"""Text of other systems and terminals: prompts from files with marks and other ends of lines, letters that cannot be
printed.

Ends of lines are those of Python's universal newlines; a byte-order mark is none of the text (Unicode 15, 23.8).
"""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from apex.cli.generate import check_text, read_lines
from apex.cli.output import InputError

LINES = {
    "Unix": (b"one\ntwo\n\nthree", "utf-8", ("one", "two", "three")),
    "Windows": (b"\xef\xbb\xbfone\r\ntwo\r\n\r\nthree\r\n", "utf-8", ("one", "two", "three")),
    "old Macs": (b"one\rtwo\r", "utf-8", ("one", "two")),
    "blank lines": (b"\xef\xbb\xbf\r\n  \r\none \r\n", "utf-8", ("one ",)),
    "other separators are letters of a prompt": ("a\u2028b\x0bc\x85\n".encode(), "utf-8", ("a\u2028b\x0bc\x85",)),
    "a mark within": ("one\n\ufefftwo\n".encode(), "utf-8", ("one", "\ufefftwo")),
    "UTF-8 in an ASCII shell": ("\ufeffé\n".encode(), "ascii", ("é",)),
    "UTF-8 in a Latin-1 shell": ("é\n".encode(), "latin-1", ("é",)),
    "Latin-1": (b"\xe9\n", "latin-1", ("é",)),
}


@pytest.mark.parametrize("name", LINES)
def test_lines_of_standard_input_are_prompts(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    given, encoding, expected = LINES[name]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given), encoding=encoding))
    assert read_lines() == expected


@pytest.mark.parametrize("given", [b"\xe9\n", "one\n".encode("utf-16")])
def test_bytes_that_are_no_text_are_refused(monkeypatch: pytest.MonkeyPatch, given: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given), encoding="utf-8"))
    with pytest.raises(InputError, match="is not UTF-8"):
        check_text(read_lines())


@pytest.mark.parametrize("module", ["apex.cli.commands", "evaluation.report"])
@pytest.mark.parametrize(("encoding", "printed"), [("ascii", "a? ? ?"), ("latin-1", "a\xe9 ? ?"), ("utf-8", "aé → 你")])
def test_letters_that_the_terminal_has_not_are_replaced(module: str, encoding: str, printed: str) -> None:
    code = f"import {module}; print('a\\u00e9 \\u2192 \\u4f60')"
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, check=False)
    assert (done.returncode, done.stdout.decode(encoding)) == (0, printed + "\n"), done.stderr
