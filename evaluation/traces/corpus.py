"""Text for prompts that exists on every machine: the documentation strings of Python's standard library.

The sources are read (not imported) module by module in a fixed order, so one Python version always gives the same
text. It has about 600,000 characters of English prose.
"""

from __future__ import annotations

import ast
import functools
import sysconfig
from pathlib import Path

MODULES = (
    "argparse", "ast", "asyncio/base_events", "asyncio/events", "calendar", "collections/__init__",
    "concurrent/futures/_base", "contextlib", "datetime", "difflib", "doctest", "email/message", "enum",
    "fractions", "functools", "http/client", "http/server", "imaplib", "inspect", "ipaddress", "json/__init__",
    "logging/__init__", "mailbox", "optparse", "os", "pathlib", "pickle", "pickletools", "pydoc", "random",
    "re/__init__", "shelve", "shutil", "smtplib", "socket", "statistics", "subprocess", "tarfile", "tempfile",
    "textwrap", "threading", "timeit", "traceback", "turtle", "typing", "unittest/case", "unittest/mock",
    "urllib/parse", "urllib/request", "uuid", "weakref", "zipfile",
)  # fmt: skip


@functools.cache
def load_corpus() -> str:
    """All documentation strings of MODULES, in order of appearance, separated by blank lines.

    Raises:
        FileNotFoundError: this Python has no sources of its library.
    """
    library = Path(sysconfig.get_path("stdlib"))
    texts: list[str] = []
    for module in MODULES:
        source = library / f"{module}.py"
        if source.is_file():  # Python versions differ in their modules
            texts += docstrings(source.read_text(encoding="utf-8"))
    if not texts:
        raise FileNotFoundError(f"no Python sources in {library} to take prompt text from; use --load-format dummy")
    return "\n\n".join(texts)


def docstrings(source: str) -> list[str]:
    """The documentation strings of a module's source, from top to bottom."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    return [text for node in nodes if (text := ast.get_docstring(node))]
