"""docs/coming_from_vllm.md: its tables of flags are those by which the commands answer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from apex.cli.options import FLAG, foreign_table

PAGE = (Path(__file__).parent.parent / "docs/coming_from_vllm.md").read_text()


def table(title: str) -> str:
    """The table of one subject, as the page has it."""
    rows = ["| vLLM | SGLang | here |", "|---|---|---|"]
    for *foreign, answer in foreign_table()[title]:
        theirs = [", ".join(f"`{flag}`" for flag in flags.split(", ") if flag) for flags in foreign]
        ours = re.sub(rf"{FLAG.pattern}|apex serve MODEL", r"`\g<0>`", answer)
        rows.append(f"| {' | '.join([*theirs, ours])} |".replace("  ", " "))
    return "\n".join(rows)


@pytest.mark.parametrize("title", foreign_table())
def test_the_table_of_a_subject_is_that_of_the_commands(title: str) -> None:
    assert table(title) == re.search(rf"^### {title}\n\n((?:\|.*\n)+)", PAGE, re.MULTILINE)[1].rstrip("\n")
