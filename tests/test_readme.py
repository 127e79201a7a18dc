"""What the README shows is what works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from swiftllm.files import cache_dir
from tests.reference.fake_engine import flat_table

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_ten_lines_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("apex.build.load_or_measure", lambda *_: flat_table(cpu_token_s=2e-6))  # measuring takes long
    if not (cache_dir() / "models" / "SmolLM2-135M-Instruct").exists():
        pytest.skip("no SmolLM2 folder: `make setup` makes it")
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "Paris" in printed
