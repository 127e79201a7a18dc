"""Options from a file: all of them, under the flags' names, below the command line, and mistakes told by their line."""

from __future__ import annotations

from pathlib import Path

import pytest

from apex.cli import main
from apex.cli.bench import Bench
from apex.cli.commands import COMMANDS
from apex.cli.generate import Generate
from apex.cli.options import option_types, parse_command, read_config_file
from apex.cli.output import InputError
from apex.cli.serve import Serve


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "options.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_a_file_gives_what_the_command_line_does_not(write):
    path = write(
        "model: /models/llama\nsystem: neo\nport: 8001\napi_key: 'secret'\nmax-model-len: 4096\nsynchronous: true\n"
        "stall-timeout-s: 5\nstrategy: asynchronous-overlap\nnum-gpu-blocks: null\n"
    )
    command = parse_command(Serve, "apex serve", ["--config", path, "--port", "8002", "--block-size", "32"])
    assert command.model == "/models/llama" and command.system == "neo" and command.config == Path(path)
    assert (command.server.port, command.server.api_key, command.server.host) == (8002, "secret", "127.0.0.1")
    assert command.limits.stall_timeout_s == 5.0 and command.strategy.strategy == "asynchronous-overlap"
    engine = command.engine
    assert (engine.max_model_len, engine.block_size, engine.synchronous) == (4096, 32, True)
    assert engine.num_gpu_blocks is None and engine.max_num_seqs == 256 and engine.model == ""
    assert parse_command(Serve, "apex serve", ["/other", f"--config={path}"]).model == "/other"
    assert not parse_command(Serve, "apex serve", [f"--config={path}", "--no-synchronous"]).engine.synchronous


def test_lists_and_single_values(write):
    path = write("system: [swiftllm, apex]\noutput: out.json\n")
    command = parse_command(Bench, "apex bench", ["folder", "--config", path])
    assert command.system == ("swiftllm", "apex") and command.output == Path("out.json")
    assert parse_command(Bench, "apex bench", ["folder", "--config", path, "--system", "neo"]).system == ("neo",)
    assert parse_command(Bench, "apex bench", ["folder", "--config", write("system: vllm\n")]).system == ("vllm",)
    assert parse_command(Generate, "apex generate", ["folder", "--config", write("prompts: [a, b]\n")]).prompts == (
        "a",
        "b",
    )


def test_a_file_may_be_empty_and_what_is_missing_is_still_asked_for(write, capsys):
    assert parse_command(Serve, "apex serve", ["folder", "--config", write("# nothing yet\n")]) == parse_command(
        Serve, "apex serve", ["folder", "--config", write("")]
    )
    with pytest.raises(SystemExit) as end:
        parse_command(Serve, "apex serve", ["--config", write("port: 1\n")])
    assert end.value.code == 2 and "MODEL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("port: 1\nnum-gpu-block: 3\n", [":2: ", "'num-gpu-block'", "did you mean num-gpu-blocks?"]),
        ("config: other.yaml\n", [":1: ", "'config'"]),
        ("engine: {}\n", [":1: ", "'engine'"]),
        ("\n\nport: eighty\n", [":3: port", "valid integer", "'eighty'"]),
        ("port: true\n", [":1: port", "wants a value"]),
        ("synchronous: 7\n", [":1: synchronous", "valid boolean"]),
        ("system: vlm\n", [":1: system", "'vllm'", "'apex'", "'vlm'"]),
        ("port: 1\nport: 2\n", [":2: port is there twice"]),
        ("port: [1\n", ["is not YAML"]),
        ("- port\n", ["must hold one `name: value` a line"]),
        ("just words\n", ["must hold one `name: value` a line"]),
    ],
)
def test_mistakes_name_their_line(write, capsys, text, parts):
    path = write(text)
    assert main(["serve", "folder", "--config", path]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("apex: ") and all(part in line for part in [path, *parts]), line


def test_a_file_that_is_not_there(capsys):
    assert main(["serve", "folder", "--config", "/nowhere.yaml"]) == 2
    assert capsys.readouterr().err == "apex: --config /nowhere.yaml: No such file or directory\n"


@pytest.mark.parametrize("verb", [verb for verb in COMMANDS if verb != "doctor"])
def test_every_option_of_every_command_may_come_from_a_file(verb, write, capsys, monkeypatch):
    """The flags that its help shows, and those alone."""
    monkeypatch.setenv("COLUMNS", "250")
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    words = capsys.readouterr().out.replace(",", " ").split()
    flags = {word.removeprefix("--").replace("-", "_") for word in words if word.startswith("--")}
    positional = {"model", "prompts"}
    names = dict(option_types(COMMANDS[verb]))
    assert set(names) - positional - {"config"} <= flags | {flag.removeprefix("no_") for flag in flags}
    name, typo = ("seed", "sead") if "seed" in names else ("threads", "treads")
    with pytest.raises(InputError, match=f"did you mean {name}"):
        read_config_file(Path(write(f"{typo}: 1\n")), COMMANDS[verb])
