"""What the README and the documents show is what works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from swiftllm.files import cache_dir

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_ten_lines_run(capsys: pytest.CaptureFixture[str]) -> None:
    if not (cache_dir() / "models" / "SmolLM2-135M-Instruct").exists():
        pytest.skip("no SmolLM2 folder: `make setup` makes it")
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "Paris" in printed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert link.startswith("https://") or (page.parent / link).exists(), link
