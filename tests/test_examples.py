"""The examples run as they stand. Those that need a model are given a tiny one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from examples import offline, server_and_client, simulate_a_machine
from tests.reference.fake_engine import flat_table
from tests.reference.tiny_model import make_tiny_llama
from tests.reference.tiny_tokenizer import make_tiny_tokenizer

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("APEX_CACHE_DIR", str(tmp_path / "cache"))
    return make_tiny_tokenizer(make_tiny_llama(tmp_path / "model"))


def test_prompts_are_completed_offline(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("apex.build.load_or_measure", lambda *_: flat_table(cpu_token_s=2e-6))  # measuring takes long
    offline.main(model)
    printed = capsys.readouterr().out
    assert all(f"{prompt} ->" in printed for prompt in offline.PROMPTS)
    assert len(re.findall(r"\((?:length|stop)\)$", printed, re.MULTILINE)) == len(offline.PROMPTS)


def test_a_server_answers_both_clients_and_stops(
    model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    by_openai, by_urllib = [], server_and_client.ask_by_urllib

    def ask_both(url: str) -> str:
        by_openai.append(server_and_client.ask_by_openai(url))
        return by_urllib(url)

    monkeypatch.setattr(server_and_client, "find_spec", lambda _: None)  # openai is not installed
    monkeypatch.setattr(server_and_client, "ask_by_urllib", ask_both)
    server_and_client.main(model)
    (answer,) = re.findall(r"^answer: (.*)\n(?:INFO|\Z)", capfd.readouterr().out, re.MULTILINE | re.DOTALL)
    assert answer and by_openai == [answer]


def test_a_server_that_ends_is_not_waited_for(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="the server has ended"):
        server_and_client.main("/no/such/folder")
    assert "/no/such/folder" in capfd.readouterr().err


def test_a_host_of_twice_the_bandwidth_is_simulated_beside_the_one_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    simulate_a_machine.main()
    table = capsys.readouterr().out.split("SIMULATED output tokens/s\n")[1]
    rates = {
        (host.strip(), system): float(rate)
        for host, system, rate in re.findall(r"^(.{45}) (\w+) +([\d.]+)$", table, re.MULTILINE)
    }
    assert len(rates) == 2 * len(simulate_a_machine.SYSTEMS)
    slow, fast = dict.fromkeys(host for host, _ in rates)
    assert "twice" in fast and rates[slow, "swiftllm"] == rates[fast, "swiftllm"]  # it leaves the CPU idle
    assert rates[slow, "neo"] < rates[fast, "neo"]


def test_commands_in_the_examples_name_files_that_exist() -> None:
    for path in (ROOT / "examples").glob("*.py"):
        assert f".venv/bin/python examples/{path.name}" in path.read_text()
