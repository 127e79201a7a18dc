"""The parameters in docs/serving/server.md: each field that requests may have is there, and what becomes of it."""

from __future__ import annotations

import re

import pytest

from evaluation.results.paths import REPO_ROOT
from swiftllm.server.protocol import NOT_IMPLEMENTED, ChatRequest, CompletionRequest


def rows() -> list[tuple[set[str], str]]:
    """The names in the first column of each row, and its second column."""
    text = (REPO_ROOT / "docs/serving/server.md").read_text()
    table = text.split("### Parameters\n")[1].split("\n\n### Sampling\n")[0]
    cells = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| `")]
    return [(set(re.findall("`([a-z_]+)`", names)), " ".join(said)) for names, *said in cells]


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
def test_every_field_that_is_read_is_said_to_be_done(kind) -> None:
    named = {name: said for names, said in rows() for name in names}
    for name in kind.model_fields:
        assert name in named, name
        assert name in ("best_of", "user") or "done" in named[name], (name, named[name])


def test_what_is_not_implemented_is_said_to_be_refused() -> None:
    refusals = [names for names, said in rows() if "refused" in said]
    for name in NOT_IMPLEMENTED:
        done_elsewhere = name in {*ChatRequest.model_fields, *CompletionRequest.model_fields}
        assert done_elsewhere or any(name in names for names in refusals), name
    for names, said in rows():
        if said.strip().startswith("refused") and "unless" not in said:
            assert names <= {*NOT_IMPLEMENTED, "none", "auto"}, names
