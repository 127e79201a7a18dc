"""The documents hold together: links and anchors lead somewhere, files that they name exist, commands parse, and a site
is built of them."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from apex.cli.commands import COMMANDS
from apex.cli.options import parse_command

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), ROOT / "examples/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PACKAGES = ("swiftllm", "apex", "pacpu", "evaluation", "configs", "scripts", "benchmarks", "tests", "examples")

CODE_BLOCK = re.compile(r"^```.*?^```$|(?:^ {4}[^\n]*\n)+", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
# A file or folder below one of the repository's own folders; `git show COMMIT:path` names one of the past.
FILE = re.compile(rf"(?<![\w:/.-])(?:{'|'.join((*PACKAGES, 'docs'))})/[\w./*-]*[\w*](?:\.\w+|/)")
COMMAND = re.compile(rf"^ {{4}}(?:\.venv/bin/)?apex ({'|'.join(COMMANDS)})\b([^#<\n]*)", re.MULTILINE)
BARE_FILE = re.compile(r"`([\w.-]+\.(?:py|sh|yaml|cpp|h))`")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", CODE_BLOCK.sub("", page.read_text()), re.MULTILINE)
    texts = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in texts}


def source_files() -> Iterator[Path]:
    for folder in PACKAGES:
        yield from (path for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".sh", ".yaml", ".cpp", ".h"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(CODE_BLOCK.sub("", page.read_text())):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    missing = [name for name in FILE.findall(LINK.sub("]", text)) if not any(ROOT.glob(name.rstrip("/")))]
    names = {path.name for path in [*source_files(), *ROOT.glob("*.py")]}
    assert not missing and set(BARE_FILE.findall(text)) <= names, missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_that_a_page_shows_parse(page: Path) -> None:
    for verb, arguments in COMMAND.findall(re.sub(r"\\\n +", "", page.read_text())):
        parse_command(COMMANDS[verb], f"apex {verb}", shlex.split(arguments))


def test_pages_that_the_code_names_exist() -> None:
    for path in source_files():
        for name in re.findall(r"(?<![\w:/.-])docs/[\w/-]+\.md", path.read_text(errors="replace")):
            assert (ROOT / name).exists(), f"{path.relative_to(ROOT)} names {name}"


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """Strict: every page is in the navigation, and every link and anchor leads somewhere in the site, too."""
    for package in ("mkdocs", "material"):
        pytest.importorskip(package, reason=f"{package} is not installed: `make setup` installs it")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "site/index.html").exists() and (tmp_path / "site/examples/custom_scheduler.py").exists()


def test_the_navigation_names_every_page() -> None:
    named = set(re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    in_docs = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    beside = {"index.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md"}  # of docs/hooks.py
    assert named == in_docs | beside
