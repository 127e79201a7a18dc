"""Where a result comes from: hashes of measured code, of models and of configurations, and the state of git."""

from __future__ import annotations

import subprocess

from evaluation.results.provenance import fingerprint, git_state, model_identity, source_hash


def test_source_hash_follows_measured_code_only(tmp_path):
    for folder in ("pacpu", "swiftllm", "apex", "evaluation"):
        (tmp_path / folder).mkdir()
    (tmp_path / "swiftllm" / "a.py").write_text("x = 1")
    before = source_hash(tmp_path)
    (tmp_path / "evaluation" / "report.py").write_text("words")
    (tmp_path / "evaluation" / "plots").mkdir()
    (tmp_path / "evaluation" / "plots" / "bars.py").write_text("colours")
    (tmp_path / "swiftllm" / "notes.txt").write_text("no code")
    assert source_hash(tmp_path) == before
    (tmp_path / "evaluation" / "gpu").mkdir()
    (tmp_path / "evaluation" / "gpu" / "report.py").write_text("only a file of the same name elsewhere presents")
    assert source_hash(tmp_path) != before
    (tmp_path / "evaluation" / "gpu" / "report.py").unlink()
    (tmp_path / "swiftllm" / "a.py").write_text("x = 2")
    changed = source_hash(tmp_path)
    assert changed != before
    (tmp_path / "pacpu" / "kernel.ispc").write_text("export void f() {}")
    assert source_hash(tmp_path) != changed


def test_git_state(tmp_path):
    assert git_state(tmp_path) == {"commit": None, "dirty": None}
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for arguments in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *arguments], check=True)
    clean = git_state(tmp_path)
    assert len(clean["commit"]) == 40 and clean["dirty"] is False
    (tmp_path / "new.py").write_text("")
    assert git_state(tmp_path) == {"commit": clean["commit"], "dirty": True}


def test_model_identity_sees_a_changed_config(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    before = model_identity(tmp_path)
    assert before["name"] == tmp_path.name and before["tokenizer"] is None
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert model_identity(tmp_path) != before


def test_fingerprint_ignores_the_order_of_keys():
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1}) != fingerprint({"a": 1, "b": 3})


def test_an_environment_within_another_checkout_does_not_take_its_commit(tmp_path):
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run(
        ["git", "-C", tmp_path, *identity, "commit", "--quiet", "--allow-empty", "-m", "a"],
        check=True,
    )
    packages = tmp_path / "venv/lib/site-packages"
    packages.mkdir(parents=True)
    assert git_state(tmp_path)["commit"] and git_state(packages) == {"commit": None, "dirty": None}
