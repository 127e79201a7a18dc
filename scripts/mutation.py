"""Do the fast tests notice a wrong scheduler, executor, simulator or block table? Mutates code and runs them.

The mutants are those of cosmic-ray's operators. It is no requirement of this project; install it beside it:

    python -m pip install --target /tmp/mutation-site cosmic-ray==8.7.0
    PYTHONPATH=/tmp/mutation-site python scripts/mutation.py --mutants 200 --seed 1 --out mutants.jsonl

Mutants are drawn with a seed: each file's share is its share of the lines, and no place in a file is drawn twice.
Each meets, in a copy of the tree, those of :data:`TESTS` that call the mutated function, until one of them fails. Left
out are annotations, protocols and operators whose mutants are nearly always type errors. ``--only NUMBER ...`` runs
drawn mutants again.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from types import CodeType, FrameType

if __name__ == "__main__" and not __package__:  # run as a file
    NEEDS = ("hypothesis", "pacpu", "pytest", "torch")
    import here
    del sys.modules["apex.environment"], sys.modules["apex"]  # tests import the packages of their own tree

import pytest

try:
    import cosmic_ray.plugins
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code
except ModuleNotFoundError:
    print(__doc__)
    sys.exit(0 if {"-h", "--help"} & set(sys.argv) else "cosmic-ray is not installed: install it as said above")

ROOT = Path(__file__).resolve().parent.parent
FILES = (
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "apex/schedulers").glob("*.py")),
    "swiftllm/engine/executor.py",
    "swiftllm/kv/blocks.py",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "swiftllm/scheduling").glob("*.py")),
    *(f"apex/simulator/{name}.py" for name in ("backend", "cpu_path", "build", "calibrated_profile")),
    *(f"apex/perf/{name}.py" for name in ("model", "lane_load")),
)
TESTS = (
    "tests/apex/schedulers",
    "tests/swiftllm/scheduling",
    "tests/swiftllm/kv",
    "tests/apex/simulator",
    "tests/swiftllm/engine",
)
UNCONCERNED = (
    "tests/swiftllm/kv/test_budget.py",
    "tests/swiftllm/scheduling/test_admission.py",
    "tests/apex/simulator/test_accounts.py::test_other_processes_give_the_same_bits",
)
"""Slow tests of other files, and a slow one that a test beside it repeats in one process."""
OPERATORS = re.compile(
    r"core/(ReplaceBinaryOperator_\w+_(Add|Sub|Mul|Div|FloorDiv|Mod)|ReplaceUnaryOperator_(USub_UAdd|Delete_\w+)"
    r"|ReplaceComparisonOperator_(Is_IsNot|IsNot_Is|(Eq|NotEq|Lt|LtE|Gt|GtE)_(Eq|NotEq|Lt|LtE|Gt|GtE))|AddNot"
    r"|Replace(TrueWithFalse|FalseWithTrue|AndWithOr|OrWithAnd|BreakWithContinue|ContinueWithBreak)"
    r"|ExceptionReplacer|NumberReplacer|RemoveDecorator|ZeroIterationForLoop)"
)
LIBRARIES = ("numpy", "torch", "transformers", "fastapi", "uvicorn", "hypothesis", "yaml", "rich")
"""Imported once, and not for each mutant."""
MEMORY_BYTES = 8 << 30  # of a mutant's process: a loop without end must not take the machine along
WALL_PER_CPU = 6  # a mutant that sleeps uses up no CPU time
LOG, CALLS = "mutation.log", "mutation-calls.json"
KEPT_OUT = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", ".hypothesis")


@dataclass(frozen=True)
class Mutant:
    file: str
    line: int
    operator: str
    occurrence: int
    """Of the operator in the file, counted by cosmic-ray."""

    def code(self) -> str:
        operator = cosmic_ray.plugins.get_operator(self.operator)()
        return mutate_code((ROOT / self.file).read_text(), operator, self.occurrence)

    def compiles(self) -> bool:
        """False of a ``**`` that is no power, and the like."""
        try:
            compile(self.code(), self.file, "exec")
        except SyntaxError:
            return False
        return True

    def change(self) -> str:
        """The line before and after."""
        before, after = (ROOT / self.file).read_text().splitlines(), self.code().splitlines()
        at = next((i for i, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), self.line - 1)
        return f"{before[at].strip()}  ->  {after[at].strip()}"


def unchecked_spans(source: str) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Where nothing runs: annotations and protocols."""
    for node in ast.walk(ast.parse(source)):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.arg | ast.AnnAssign):
            parts = [node.annotation]
        elif isinstance(node, ast.FunctionDef):
            parts = [node.returns]
        elif isinstance(node, ast.ClassDef) and any(getattr(base, "id", "") == "Protocol" for base in node.bases):
            parts = [node]
        for part in filter(None, parts):
            yield (part.lineno, part.col_offset), (part.end_lineno or 0, part.end_col_offset or 0)


def mutants_by_place(file: str) -> dict[tuple, list[Mutant]]:
    """All mutants of a file by the place they change."""
    source = (ROOT / file).read_text()
    nodes, spans = list(ast_nodes(get_ast(source))), list(unchecked_spans(source))
    places: dict[tuple, list[Mutant]] = {}
    for name in filter(OPERATORS.fullmatch, cosmic_ray.plugins.operator_names()):
        operator = cosmic_ray.plugins.get_operator(name)()
        found = [place for node in nodes for place in operator.mutation_positions(node)]
        for occurrence, (start, end) in enumerate(found):
            if not any(first <= start < last for first, last in spans):
                places.setdefault((start, end), []).append(Mutant(file, start[0], name, occurrence))
    return places


def draw(count: int, seed: int) -> list[Mutant]:
    """``count`` mutants or a few more: every file gets its share of them, rounded up."""
    rng = random.Random(seed)
    lines = {file: len((ROOT / file).read_text().splitlines()) for file in FILES}
    drawn = []
    for file in FILES:
        places = sorted(mutants_by_place(file).items())
        share = -(-count * lines[file] // sum(lines.values()))
        for _, mutants in sorted(rng.sample(places, min(share, len(places)))):
            drawn.append(rng.choice(mutants))
    return drawn


class CallRecorder:
    """Writes down for each test how long it takes and which functions of :data:`FILES` it calls."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        self.calls: dict[str, tuple[float, list[tuple[str, int]]]] = {}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        codes: set[CodeType] = set()

        def trace(frame: FrameType, event: str, argument: object) -> None:
            codes.add(frame.f_code)

        started_s = time.monotonic()
        threading.settrace(trace)
        sys.settrace(trace)
        yield
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        names = {code: os.path.relpath(code.co_filename, self.tree) for code in codes}
        called = [(name, code.co_firstlineno) for code, name in names.items() if name in FILES]
        self.calls[item.nodeid] = (time.monotonic() - started_s, called)

    def pytest_sessionfinish(self) -> None:
        (self.tree / CALLS).write_text(json.dumps(self.calls))


class Selection:
    """Runs the given tests in the given order."""

    def __init__(self, node_ids: Sequence[str]) -> None:
        self.place = {node_id: i for i, node_id in enumerate(node_ids)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((item for item in items if item.nodeid in self.place), key=lambda i: self.place[i.nodeid])


def tests_of(tree: Path, mutant: Mutant) -> list[str]:
    """The tests that call the function a mutant is in, the fastest first; all tests if it is outside of functions."""
    calls = json.loads((tree / CALLS).read_text())
    tests = sorted(calls, key=lambda node_id: calls[node_id][0])
    for node in ast.walk(ast.parse((ROOT / mutant.file).read_text())):  # the outermost function comes first
        if isinstance(node, ast.FunctionDef):
            first, last = min([node, *node.decorator_list], key=attrgetter("lineno")).lineno, node.end_lineno or 0
            if first <= mutant.line <= last:
                inside = [[mutant.file, line] for line in range(first, last + 1)]
                return [test for test in tests if any(called in inside for called in calls[test][1])]
    return tests


def run_tests(tree: Path, tests: Sequence[str] | None, limit_s: int) -> None:
    """In a process of its own: run the tests, or record what all of them call, and exit with pytest's code."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s + 1))
    with (tree / LOG).open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    os.chdir(tree)
    sys.path[:] = [str(tree), *(entry for entry in sys.path if entry not in ("", str(ROOT), str(ROOT / "scripts")))]
    files = TESTS if tests is None else sorted({test.split("::")[0] for test in tests})
    left_out = [f"--deselect={test}" if "::" in test else f"--ignore={test}" for test in UNCONCERNED]
    plugin = CallRecorder(tree) if tests is None else Selection(tests)
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *left_out, *files], plugins=[plugin])
    sys.stdout.flush()
    os._exit(int(code))


def outcome(tree: Path, tests: Sequence[str] | None, limit_s: int) -> tuple[str, float, str]:
    """What the tests say about the tree: killed, survived or timeout; seconds; the test that failed."""
    started_s = time.monotonic()
    process = multiprocessing.get_context("fork").Process(target=run_tests, args=(tree, tests, limit_s))
    process.start()
    process.join(WALL_PER_CPU * limit_s)
    late = process.is_alive() or process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", (tree / LOG).read_text(), re.MULTILINE)
    said = "timeout" if late else "survived" if process.exitcode == 0 else "killed"
    return said, time.monotonic() - started_s, failed[0] if failed else ""


def try_mutant(tree: Path, mutant: Mutant, limit_s: int) -> tuple[str, float, str]:
    path = tree / mutant.file
    original = path.read_text()
    for cached in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        cached.unlink()  # a mutant of the same size, written in the same second, would pass for it
    path.write_text(mutant.code())
    try:
        tests = tests_of(tree, mutant)
        return outcome(tree, tests, limit_s) if tests else ("survived", 0.0, "")
    finally:
        path.write_text(original)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit-s", type=int, default=20, help="CPU seconds of the tests of one mutant")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of drawn mutants")
    parser.add_argument(
        "--part", type=int, nargs=2, default=(0, 1), metavar=("I", "N"), help="every N-th from the I-th"
    )
    parser.add_argument("--out", type=Path, help="a line of JSON for each mutant")
    args = parser.parse_args()
    drawn = {number: mutant for number, mutant in enumerate(draw(args.mutants, args.seed)) if mutant.compiles()}
    chosen = args.only or list(drawn)[args.part[0] :: args.part[1]]

    for library in LIBRARIES:
        importlib.import_module(library)
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=KEPT_OUT)
        said, seconds, failed = outcome(tree, None, 10 * args.limit_s)
        print(f"{len(drawn)} mutants drawn; the tests without a mutant took {seconds:.0f} s", flush=True)
        if said != "survived":
            sys.exit(
                f"the tests fail without a mutant: {failed or said}\n{(tree / 'mutation.log').read_text()[-3000:]}"
            )
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        counts: dict[str, Counter[str]] = {}
        for number in chosen:
            mutant = drawn[number]
            said, seconds, failed = try_mutant(tree, mutant, args.limit_s)
            counts.setdefault(mutant.file, Counter())[said] += 1
            change = mutant.change()
            print(f"{number:4} {said:9}{seconds:4.0f} s  {mutant.file}:{mutant.line}  {change}  {failed}", flush=True)
            if args.out:
                record = {**asdict(mutant), "number": number, "outcome": said, "change": change, "failed": failed}
                with args.out.open("a") as out:
                    out.write(json.dumps(record) + "\n")
    for file, count in counts.items():
        print(f"{file:40}", *(f"{count[said]:4} {said}" for said in ("killed", "timeout", "survived")))
    total = sum(counts.values(), Counter())
    print(
        f"{total.total()} mutants: {total['killed']} killed, {total['timeout']} timed out, {total['survived']} survived"
    )


if __name__ == "__main__":
    main()
