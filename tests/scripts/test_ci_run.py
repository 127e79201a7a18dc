"""What .ci/run says and asks of the tests with and without a browser. ``make`` and the browser are made up."""

import os
import shutil
import subprocess
from pathlib import Path

from tests.scripts.conftest import SCRIPTS, add_tool

TESTS_END = "1 failed, 6 passed, 7 skipped in 3.2s"
ORDER = "order of the tests: --order-seed 7"
SKIPPED = "skipped without a browser: tests/test_page.py (7); run scripts/install_chromium.sh"


def run_ci(bare_path: Path, cache: Path, **variables: str) -> subprocess.CompletedProcess:
    for tool in ("sed", "tee"):
        (bare_path / tool).symlink_to(shutil.which(tool))
    add_tool(
        bare_path,
        "make",
        f"""[ "$1" != setup ] || exit 0
        echo "required: ${{APEX_REQUIRE_BROWSER:-no}}"
        [ "$APEX_REQUIRE_BROWSER" ] || echo "{SKIPPED}"
        echo "=== short test summary info ==="
        echo "FAILED tests/test_page.py::test_a"
        echo "{ORDER}"
        echo "{TESTS_END}"
        echo "a line of make" >&2
        exit ${{TESTS_STATUS:-2}}""",
    )
    env = {"PATH": str(bare_path), "APEX_CACHE_DIR": str(cache), "HOME": os.environ.get("HOME", "/")}
    command = [SCRIPTS.parent / ".ci/run"]
    return subprocess.run(command, env=env | variables, capture_output=True, text=True, timeout=300)


def test_with_a_browser_no_test_of_a_page_may_be_skipped(bare_path, tmp_path):
    add_tool(bare_path, "chromium", 'echo "<p>rendered</p>"')
    done = run_ci(bare_path, tmp_path / "cache")
    lines = done.stdout.splitlines()
    assert "required: 1" in lines and done.returncode == 2
    assert lines[lines.index("----") + 1 :] == ["FAILED tests/test_page.py::test_a", ORDER, TESTS_END]


def test_without_a_browser_it_lists_what_was_skipped(bare_path, tmp_path):
    add_tool(bare_path, "uname", "echo aarch64")  # for which there is no recipe
    done = run_ci(bare_path, tmp_path / "cache")
    lines = done.stdout.splitlines()
    assert "required: no" in lines and any(line.startswith("chromium: not installed") for line in lines)
    failed, told, *ends = lines[lines.index("----") + 1 :]
    assert failed.startswith("FAILED") and "no browser could be installed" in told
    assert ends == [SKIPPED, ORDER, TESTS_END]
