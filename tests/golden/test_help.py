"""Every command has the help that was recorded in ``help/``."""

import pytest

from tests.golden import help


@pytest.mark.parametrize("name", help.COMMANDS)
def test_help_is_that_recorded(name: str) -> None:
    assert help.text(name) == help.path_of(name).read_text()


def test_no_command_is_gone() -> None:
    assert {path.stem for path in help.path_of("").parent.glob("*.txt")} == set(help.COMMANDS)
