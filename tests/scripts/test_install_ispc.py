"""The paths of install_ispc.sh that need no network."""

import pytest

from tests.scripts.conftest import add_tool, run_script

SCRIPT = "install_ispc.sh"


def test_working_system_compiler_is_used(bare_path, tmp_path):
    add_tool(bare_path, "ispc", 'for last; do :; done; [ "$1" = --version ] && echo "fake 1.0" || echo code >"$last"')
    result = run_script(SCRIPT, bare_path, tmp_path / "cache")
    assert result.returncode == 0
    assert f"using the system's {bare_path}/ispc (fake 1.0)" in result.stdout
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("broken_ispc", [False, True])
def test_without_apt_the_build_goes_on(bare_path, tmp_path, broken_ispc):
    if broken_ispc:
        add_tool(bare_path, "ispc", "exit 3")
    result = run_script(SCRIPT, bare_path, tmp_path / "cache")
    assert result.returncode == 0
    assert "not installed: apt-get not found" in result.stdout
    assert "the other CPU attention kernels serve" in result.stdout


def test_other_processors_are_told_so(bare_path, tmp_path):
    add_tool(bare_path, "uname", 'case "$1" in -s) echo Linux ;; *) echo aarch64 ;; esac')
    result = run_script(SCRIPT, bare_path, tmp_path / "cache")
    assert result.returncode == 0
    assert "no recipe for Linux on aarch64" in result.stdout


def test_unexpected_failure_does_not_break_the_build(bare_path, tmp_path):
    (bare_path / "mktemp").unlink()
    add_tool(bare_path, "mktemp", "exit 1")
    for tool in ("apt-get", "dpkg-deb"):
        add_tool(bare_path, tool, "echo main http://example.invalid/debian http://example.invalid/ubuntu")
    result = run_script(SCRIPT, bare_path, tmp_path / "cache")
    assert result.returncode == 0
    assert "not installed" in result.stdout
