"""Checks the source: ruff's rules and format, then pyright's types.

python scripts/lint.py

Of pyright, some folders may have no error, and all others together at most a recorded number, which may only fall:
both stand in pyproject.toml under [tool.apex.lint].
"""

from __future__ import annotations

if __name__ == "__main__":
    NEEDS = ("ruff",)
    import here

import argparse
import json
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Run all checks, and return 1 if one of them fails."""
    argparse.ArgumentParser(description="Check style and types: ruff, then pyright.").parse_args()
    commands = (["check", "--quiet", "."], ["format", "--quiet", "--check", "."])
    failed = [subprocess.run([sys.executable, "-m", "ruff", *command], cwd=ROOT).returncode for command in commands]
    if failed[1]:
        print("lint: some files are not formatted: run `ruff format`", file=sys.stderr)
    errors = pyright_errors()
    if errors is None:
        print("lint: types are not checked, since pyright is not installed or did not run; `make setup` installs it")
        return int(any(failed))
    rules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["apex"]["lint"]
    types_are_right, report = judge(errors, rules["without-errors"], rules["most-errors-elsewhere"])
    print(report)
    return int(any(failed) or not types_are_right)


def pyright_errors() -> list[dict[str, Any]] | None:
    """Pyright's errors, each with `file` relative to the repository; None if pyright cannot be run."""
    if find_spec("pyright") is None:
        return None
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    try:
        found = json.loads(answer.stdout)["generalDiagnostics"]
    except (ValueError, KeyError):
        print(answer.stderr or answer.stdout, file=sys.stderr)
        return None
    return [
        error | {"file": str(Path(error["file"]).relative_to(ROOT))} for error in found if error["severity"] == "error"
    ]


def judge(errors: list[dict[str, Any]], clean_folders: list[str], most_elsewhere: int) -> tuple[bool, str]:
    """Whether the errors are within the rules, and what to tell about them."""
    folders = tuple(f"{folder}/" for folder in clean_folders)
    unwanted = [error for error in errors if error["file"].startswith(folders)]
    elsewhere = len(errors) - len(unwanted)
    lines = [f"{place(error)}: {error['message']}" for error in unwanted]
    if unwanted:
        lines.append(f"lint: {len(unwanted)} type errors where there may be none ({', '.join(clean_folders)})")
    if elsewhere > most_elsewhere:
        lines += [f"{place(error)}: {error['message']}" for error in errors if error not in unwanted]
        lines.append(f"lint: {elsewhere} type errors elsewhere, and there may be {most_elsewhere}: mend the new ones")
    elif elsewhere < most_elsewhere:
        lines.append(
            f"lint: {elsewhere} type errors elsewhere, fewer than {most_elsewhere}: lower most-errors-elsewhere in "
            f"pyproject.toml to {elsewhere}"
        )
    else:
        lines.append(f"lint: {elsewhere} type errors elsewhere, as many as there may be")
    return not unwanted and elsewhere <= most_elsewhere, "\n".join(lines)


def place(error: dict[str, Any]) -> str:
    """FILE:LINE:COLUMN of an error, counted from 1."""
    start = error["range"]["start"]
    return f"{error['file']}:{start['line'] + 1}:{start['character'] + 1}"


if __name__ == "__main__":
    sys.exit(main())
