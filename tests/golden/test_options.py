"""docs/serving/options.md lists every option of every `apex` command, as the command is now."""

import re

from tests.golden import help, options


def test_the_page_of_options_is_current() -> None:
    assert options.PATH.read_text() == options.page(), "run `.venv/bin/python -m tests.golden`"


def test_every_flag_of_a_help_is_on_the_page() -> None:
    page = options.PATH.read_text()
    for name in help.APEX:
        flags = re.findall(r"^  (--[a-z][\w-]*)", help.path_of(f"apex-{name}").read_text(), re.MULTILINE)
        assert flags and all(f"| `{flag}` |" in page for flag in flags)


def test_an_option_is_taken_apart() -> None:
    (group,) = [of for title, of in options.groups_of(options.COMMANDS["serve"]).items() if title == "server options"]
    assert group[1] == ("--port", "INT", "Port to listen on; 0 takes any free port.", "8000")
