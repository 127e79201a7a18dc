"""Records the golden values anew, and says which changed."""

import tempfile
from pathlib import Path
from typing import Any

from tests.golden import help, options, plans, record, settings, tokens
from tests.reference.tiny_model import make_tiny_llama


def renew(name: str, system: str, now: dict[str, Any]) -> None:
    before = record.read(name)
    old = before.get(system, {})
    print(name, system, "changed:", [key for key in now if now[key] != old.get(key)] or "nothing", flush=True)
    record.write(name, before | {system: now})


if __name__ == "__main__":
    for system in plans.SYSTEMS:
        chosen = {name: workload for name, workload in plans.WORKLOADS.items() if plans.applies(system, name)}
        renew("plans", system, {name: plans.digests(system, workload) for name, workload in chosen.items()})
        chosen = [name for name in settings.SETTINGS if settings.applies(system, name)]
        renew("settings", system, {name: settings.row(system, name) for name in chosen})
    with tempfile.TemporaryDirectory() as folder:
        now = tokens.tokens(make_tiny_llama(Path(folder)), "vllm")[0]
    print("tokens changed:", now != record.read("tokens"))
    record.write("tokens", now)
    for name in help.COMMANDS:
        path, printed = help.path_of(name), help.text(name)
        if not path.exists() or path.read_text() != printed:
            print("help of", name, "changed")
            path.write_text(printed)
    changed = not options.PATH.exists() or options.PATH.read_text() != options.page()
    print("page of options changed:", changed)
    options.PATH.write_text(options.page())
