"""Every command has the help that was recorded in ``help/``."""

import signal

import pytest

from tests.golden import help


@pytest.mark.parametrize("name", help.COMMANDS)
def test_help_is_that_recorded(name: str) -> None:
    assert help.text(name) == help.path_of(name).read_text()


def test_commands_leave_signals_as_they_were() -> None:
    before = signal.getsignal(signal.SIGTERM)
    help.text("evaluation-load_test")  # handles SIGTERM, since it starts servers
    assert signal.getsignal(signal.SIGTERM) == before


def test_no_command_is_gone() -> None:
    assert {path.stem for path in help.path_of("").parent.glob("*.txt")} == set(help.COMMANDS)
