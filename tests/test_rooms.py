"""Imports go down only: no circle among modules or packages, and few enough files to find one's way."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("swiftllm", "apex", "pacpu", "evaluation", "scripts", "benchmarks")
FLOORS = {"pacpu": 0, "swiftllm": 1, "apex": 2, "evaluation": 3, "scripts": 4, "benchmarks": 4}
MOST_FILES = 250
"""Of the product, those of one line left out."""


def modules() -> dict[str, Path]:
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    return {name.removesuffix(".__init__"): path for name, path in zip(names, paths, strict=True)}


def imports(known: Mapping[str, Path], *, with_types: bool) -> dict[str, set[str]]:
    """Module by module what it imports, in functions too; ``with_types``: also what annotations alone need."""
    found: dict[str, set[str]] = {}
    for name, path in known.items():
        tree = ast.parse(path.read_text())
        for_types = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            for inner in ast.walk(node)
        }
        targets: set[str] = set()
        for node in ast.walk(tree):
            if id(node) in for_types and not with_types:
                continue
            if isinstance(node, ast.ImportFrom) and node.module:
                of_package = [f"{node.module}.{alias.name}" for alias in node.names]
                targets |= {full if full in known else node.module for full in of_package}
            elif isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
        found[name] = {target for target in targets if target in known and target != name}
    return found


def circles(edges: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """What reaches itself, with all that reaches and is reached by it."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = list(edges.get(start, ()))
        while ahead:
            if (name := ahead.pop()) not in seen:
                seen.add(name)
                ahead += edges.get(name, ())
        return seen

    reach = {name: reached(name) for name in edges}
    groups = {tuple(sorted(other for other in reach[name] if name in reach.get(other, ()))) for name in edges}
    return [list(group) for group in sorted(groups) if group]


def room(module: str) -> str:
    """``swiftllm.kv`` of ``swiftllm.kv.block_pool``; a module at the top of a package is a room of its own."""
    return ".".join(module.split(".")[:2])


def test_circles_are_found() -> None:
    assert circles({"a": ["b"], "b": ["c"], "c": ["b"], "d": ["d"], "e": ["a"]}) == [["b", "c"], ["d"]]


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert circles(imports(modules(), with_types=False)) == []


def test_nor_for_annotations() -> None:
    assert circles(imports(modules(), with_types=True)) == []


def test_no_room_imports_itself_by_way_of_others() -> None:
    rooms: dict[str, set[str]] = defaultdict(set)
    for module, targets in imports(modules(), with_types=False).items():
        if module.startswith(("swiftllm.", "apex.")):
            rooms[room(module)] |= {room(target) for target in targets} - {room(module)}
    assert circles(rooms) == []


def test_packages_import_from_below() -> None:
    for module, targets in imports(modules(), with_types=False).items():
        package = module.partition(".")[0]
        above = [target for target in targets if FLOORS[target.partition(".")[0]] > FLOORS[package]]
        assert not above, f"{module} imports {above}"


def test_the_product_has_few_files() -> None:
    files = [path for path in modules().values() if path.read_text().count("\n") > 1]
    assert len(files) <= MOST_FILES
