"""What the README shows is what works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from swiftllm.paths import cache_dir

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_ten_lines_run(capsys: pytest.CaptureFixture[str]) -> None:
    if not (cache_dir() / "models" / "SmolLM2-135M-Instruct").exists():
        pytest.skip("no SmolLM2 folder: `make setup` makes it")
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "Paris" in printed


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    for link in links:
        assert (Path(__file__).parent.parent / link).exists(), link
