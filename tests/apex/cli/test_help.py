"""What --help says: a text and one default for every option."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from apex.cli import main
from apex.cli.commands import COMMANDS, OPTIONAL_VERBS


def help_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The words of a help page, on one line."""
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--help"])
    assert end.value.code == 0
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


@pytest.mark.parametrize("verb", [*COMMANDS, *OPTIONAL_VERBS])
def test_every_option_has_a_text_and_one_default(verb, capsys):
    words = help_of(capsys, verb)
    assert verb == "doctor" or "by default" in words
    for nothing in ("(default: None)", "(default: )", "{None}|"):
        assert nothing not in words
    assert re.findall(r"--[\w-]+ (?:\S+ )?\(default", words) == []


def test_a_default_from_a_file_is_shown(tmp_path, capsys):
    path = tmp_path / "options.yaml"
    path.write_text("num-gpu-blocks: 64\n")
    words = help_of(capsys, "serve", "--config", str(path))
    assert re.search(r"--num-gpu-blocks INT [^(]*\(default: 64\)", words)


@pytest.mark.parametrize("verb", ["serve", "simulate"])
def test_the_kernels_are_the_same_everywhere(verb, capsys):
    assert "--cpu-kernel STR CPU attention kernel: native, ispc or llamafile" in help_of(capsys, verb)


def test_a_reader_of_help_may_leave():
    """As `apex simulate --help | head -1` does."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "apex", "simulate", "--help"]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=300)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, "")
