"""Where golden values are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def read(name: str) -> dict[str, Any]:
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def write(name: str, values: dict[str, Any]) -> None:
    (FOLDER / f"{name}.json").write_text(json.dumps(values, indent=1) + "\n")
