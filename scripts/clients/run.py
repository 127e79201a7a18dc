"""Tries one client against a running server, and prints a row of a Markdown table for each thing tried.

usage, from the repository's root and with the client's own Python: python -m scripts.clients.run CLIENT URL MODEL

The exit status is 0 if all works.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import version

from scripts.clients.shared import Server

MAX_MESSAGE_CHARS = 300


def main(client: str, url: str, model: str) -> int:
    module = import_module(f"scripts.clients.use_{client}")
    name = f"{module.PACKAGE} {version(module.PACKAGE)}"
    all_work = True
    for check in module.CHECKS:
        try:
            check(Server(url, model))
            result = "works"
        except Exception as error:
            all_work = False
            result = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_MESSAGE_CHARS].replace("|", "\\|")
        print(f"| {name} | {check.__doc__.rstrip('.')} | {result} |", flush=True)
    return 0 if all_work else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
