"""What the site needs beyond docs/: pages at the top of the repository, and files to which pages link."""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "examples/README.md": "examples/README.md",
}
"""By their paths in the repository, their paths in the site. What is in docs/ keeps its path below it."""
LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)")


def site_path(path: str) -> str:
    """Where a file of the repository is in the site."""
    return PAGES.get(path) or (posixpath.relpath(path, "docs") if path.startswith("docs/") else path)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    for path, in_site in PAGES.items():
        files.append(File.generated(config, in_site, content=(ROOT / path).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links within the repository into links within the site; linked files that are no pages are added."""
    here = {in_site: path for path, in_site in PAGES.items()}.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def in_site(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), link[1]))
        target = site_path(path)
        if files.get_file_from_path(target) is None and (ROOT / path).is_file():
            files.append(File.generated(config, target, content=(ROOT / path).read_bytes()))
        return posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or os.curdir)

    return LINK.sub(in_site, markdown)
