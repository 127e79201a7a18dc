"""The recipes of docs/features/distributed.md: commands that parse, ports and paths that fit together."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from starlette.routing import Match

from apex.cli.commands import COMMANDS
from apex.cli.options import parse_command
from swiftllm.machine import Share
from swiftllm.server.app import create_app
from swiftllm.server.settings import ServerSettings
from tests.swiftllm.server.fake_service import FakeService

PAGE = Path(__file__).resolve().parents[1].joinpath("docs/features/distributed.md").read_text()


def commands() -> list[list[str]]:
    lines = [line.strip().partition("#")[0] for line in PAGE.splitlines() if re.match(r"    apex ", line)]
    return [shlex.split(line)[1:] for line in lines]


def test_every_command_of_the_page_parses() -> None:
    parsed = [parse_command(COMMANDS[verb], f"apex {verb}", arguments) for verb, *arguments in commands()]
    assert len(parsed) >= 8


def test_the_proxy_sends_to_the_ports_of_the_replicas() -> None:
    serves = [parse_command(COMMANDS["serve"], "apex serve", words[1:]) for words in commands() if "--share" in words]
    shares = [Share.parse(serve.share) for serve in serves]
    assert shares == [Share(number, len(shares)) for number in range(1, len(shares) + 1)]
    config = PAGE.split("```nginx\n")[1].split("```")[0]
    assert config.count("{") == config.count("}")
    ports = [int(port) for port in re.findall(r"server 127\.0\.0\.1:(\d+)", config)]
    assert ports == [serve.server.port for serve in serves]
    assert int(re.search(r"listen (\d+);", config)[1]) not in ports
    service = FakeService()
    routes = create_app(service, ServerSettings()).routes
    for location in re.findall(r"location (?:= )?(/\S+) {", config):
        path = location + "models" * location.endswith("/")
        scope = {"type": "http", "method": "GET", "path": path, "headers": []}
        assert any(route.matches(scope)[0] is Match.FULL for route in routes), path
