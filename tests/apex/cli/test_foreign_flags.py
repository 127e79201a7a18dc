"""A flag of vLLM or SGLang is answered by what stands for it here; a misspelt flag of ours by the nearest one."""

from __future__ import annotations

from pathlib import Path

import pytest

from apex.cli.bench import Bench
from apex.cli.commands import COMMANDS
from apex.cli.generate import Generate
from apex.cli.options import FLAG, flags, foreign_table, parse_command
from apex.cli.output import InputError
from apex.cli.serve import Serve
from tests.golden.options import groups_of


@pytest.mark.parametrize("command", [Serve, Generate, Bench], ids=lambda command: command.__name__)
@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("--gpu-memory-utilization 0.9", "--num-gpu-blocks"),
        ("--gpu_memory_utilization=0.9", "--num-gpu-blocks"),
        ("--mem-fraction-static 0.8", "--num-gpu-blocks"),
        ("--cpu-offload-gb 4", "--weights-gpu-memory"),
        ("--swap-space 4", "--num-cpu-blocks"),
        ("--enable-prefix-caching", "the prefix cache is on"),
        ("--disable-radix-cache", "--no-enable-prefix-caching"),
        ("-tp 2", "--tensor-parallel"),
        ("--tp 2", "--tensor-parallel"),
        ("--context-length 4096", "--max-model-len"),
        ("--kv-cache-dtype fp8", "--cpu-kv-dtype"),
        ("--quantization awq", "config.json"),
        ("--enforce-eager", "Missing"),
        ("--chunked-prefill-size 512", "--max-num-batched-tokens"),
        ("--max-running-requests 8", "--max-num-seqs"),
        ("--model folder", "apex serve MODEL"),
    ],
)
def test_a_foreign_flag_is_answered(command: type, typed: str, answer: str) -> None:
    with pytest.raises(InputError) as refused:
        parse_command(command, "apex", ["folder", *typed.split()])
    (line,) = str(refused.value).splitlines()[1:]
    flag = typed.partition(" ")[0].partition("=")[0].replace("_", "-")
    assert line.split()[0] == flag and answer in line


def test_all_foreign_flags_of_a_line_are_answered_at_once() -> None:
    with pytest.raises(InputError, match=r"(?s)--enforce-eager .*--tp .*"):
        parse_command(Serve, "apex serve", ["folder", "--enforce-eager", "--tp", "2", "--port", "1"])


def test_in_a_file_too(tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text("gpu-memory-utilization: 0.9\n")
    with pytest.raises(InputError, match=r"options\.yaml:1: .*(?s:.)*--num-gpu-blocks"):
        parse_command(Serve, "apex serve", ["folder", "--config", str(path)])


def test_what_a_file_turns_off_the_command_line_turns_on(tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text("enable-prefix-caching: false\n")
    arguments = ["folder", "--config", str(path)]
    assert not parse_command(Serve, "apex serve", arguments).engine.enable_prefix_caching
    assert parse_command(Serve, "apex serve", [*arguments, "--enable-prefix-caching"]).engine.enable_prefix_caching


def test_a_misspelt_flag_is_answered_by_the_parser(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_command(Serve, "apex serve", ["folder", "--num-gpu-block", "9"])
    assert "--num-gpu-blocks" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_flags_are_those_of_the_parser(name: str) -> None:
    parsed = {option.flag for group in groups_of(COMMANDS[name]).values() for option in group}
    assert set(flags(COMMANDS[name], {})) == {flag for flag in parsed if flag.startswith("--")}


def test_answers_name_flags_that_there_are() -> None:
    rows = [row for rows in foreign_table().values() for row in rows]
    named = {flag for *_, answer in rows for flag in FLAG.findall(answer)}
    assert len(named) > 25 and named <= set(flags(Serve, {}))
