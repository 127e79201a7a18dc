"""Type errors: none in the folders that are to have none, and no more than recorded elsewhere."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest

from scripts import lint

CLEAN = ["swiftllm/core", "apex/schedulers"]


def error(file: str) -> dict[str, Any]:
    return {"file": file, "message": "is wrong", "range": {"start": {"line": 2, "character": 4}}}


def test_an_error_in_a_clean_folder_is_shown_and_fails() -> None:
    right, report = lint.judge([error("swiftllm/core/plan.py"), error("swiftllm/ops/a.py")], CLEAN, 1)
    assert not right
    assert report.splitlines()[0] == "swiftllm/core/plan.py:3:5: is wrong" and "1 type errors where" in report
    assert "swiftllm/ops/a.py" not in report


@pytest.mark.parametrize(
    ("most", "right", "said"),
    [(1, False, "there may be 1"), (2, True, "as many as there may be"), (3, True, "lower .* to 2")],
)
def test_the_number_elsewhere_may_only_fall(most: int, right: bool, said: str) -> None:
    errors = [error("swiftllm/core_of_others.py"), error("apex/perf/model.py")]
    found, report = lint.judge(errors, CLEAN, most)
    assert found == right
    assert re.search(said, report)
    assert ("apex/perf/model.py:3:5" in report) == (not right)  # a number that grew shows where to look


def test_without_pyright_one_sentence_says_so_and_the_rest_decides(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status = 0
    monkeypatch.setattr("sys.argv", ["lint"])
    monkeypatch.setattr(lint, "find_spec", lambda name: None if name == "pyright" else name)
    monkeypatch.setattr(lint.subprocess, "run", lambda *_, **__: type("Answer", (), {"returncode": status}))
    assert lint.main() == 0
    assert "types are not checked" in capsys.readouterr().out
    status = 1
    assert lint.main() == 1


def test_the_clean_folders_exist() -> None:
    rules = tomllib.loads((lint.ROOT / "pyproject.toml").read_text())["tool"]["apex"]["lint"]
    assert all((lint.ROOT / folder).is_dir() for folder in rules["without-errors"])
