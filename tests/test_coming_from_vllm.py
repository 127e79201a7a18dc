"""docs/coming_from_vllm.md: the flags that it gives as ours are ours."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
FLAG = re.compile(r"`(--[a-z-]+)")


def test_our_flags_are_options_of_serve() -> None:
    page = (DOCS / "coming_from_vllm.md").read_text()
    flags = page.split("## Flags\n")[1].split("## What is missing\n")[0]
    ours = {flag for row in re.findall(r"^\|.*\|$", flags, re.MULTILINE) for flag in FLAG.findall(row.split(" | ")[-1])}
    options = (DOCS / "serving/options.md").read_text()
    known = options.split("## `apex serve`\n")[1].split("\n## ")[0] + options.split("## Engine options\n")[1]
    assert len(ours) > 25
    assert ours <= set(FLAG.findall(known))
