"""The paths of install_chromium.sh that need no network."""

import pytest

from tests.scripts.conftest import add_tool, run_script

SCRIPT = "install_chromium.sh"


def test_working_system_browser_is_used(bare_path, tmp_path):
    add_tool(bare_path, "chromium", '[ "$1" = --version ] && echo "fake 1.0" || echo "<p>rendered</p>"')
    result = run_script(SCRIPT, bare_path, tmp_path / "cache")
    assert result.returncode == 0
    assert f"using the system's {bare_path}/chromium (fake 1.0)" in result.stdout
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_where_there_is_no_recipe_it_says_what_to_do(bare_path, tmp_path, machine):
    add_tool(bare_path, "chromium", "exit 3")
    add_tool(bare_path, "uname", f"echo {machine}")
    result = run_script(SCRIPT, bare_path, tmp_path / "cache")
    assert result.returncode == 1
    assert "not installed" in result.stderr and "yourself and put it on PATH" in result.stderr
    assert not (tmp_path / "cache" / "chromium").exists()
