"""Models by the hub's names: from a hub on the loopback, which knows one model, and from its cache."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from swiftllm.model.folder import model_folder, model_name

NAME = "some-org/Tiny-Llama.v1"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"version": "1.0"}',
    "model-00001-of-00001.safetensors": b"weights",
    "consolidated.safetensors": b"the same once more",
    "original/model.safetensors": b"and again",
    "pytorch_model.bin": b"in another format",
    "merges.txt": b"a b",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "original/params.json": b"{}",
}


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's interface that a download takes."""

    asked: list[str]

    def __init__(self, asked: list[str], *args) -> None:
        self.asked = asked
        super().__init__(*args)

    def do_GET(self) -> None:
        self.asked.append(self.path)
        path = self.path.split("?")[0]
        if path == f"/api/models/{NAME}/revision/main":
            siblings = [{"rfilename": name} for name in FILES]
            self.answer(200, json.dumps({"id": NAME, "sha": COMMIT, "siblings": siblings}).encode())
        elif path == f"/api/models/{NAME}/tree/{COMMIT}":
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in FILES.items()
            ]
            self.answer(200, json.dumps(entries).encode())
        elif (file := path.removeprefix(f"/{NAME}/resolve/{COMMIT}/")) in FILES:
            self.answer(200, FILES[file], {"X-Repo-Commit": COMMIT, "ETag": hashlib.sha1(FILES[file]).hexdigest()})
        else:
            self.answer(404, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})

    do_HEAD = do_GET

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str]]]:
    """Its address, and what it has been asked for."""
    asked: list[str] = []
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, asked)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


@pytest.fixture
def ask(hub, tmp_path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``model_folder`` in a process of its own: huggingface_hub reads its variables when it is imported."""

    def run(name: str, weights: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
        code = f"from swiftllm.model.folder import model_folder; print(model_folder({name!r}, weights={weights}))"
        environment = {**os.environ, "HF_ENDPOINT": hub[0], "HF_HOME": str(tmp_path / "hf"), "no_proxy": "*"}
        environment = {key: value for key, value in environment.items() if not key.startswith("HF_HUB_")}
        command = [sys.executable, "-c", code]
        return subprocess.run(command, env={**environment, **variables}, capture_output=True, text=True, timeout=300)

    return run


def test_a_model_is_downloaded_once_and_then_needs_no_network(ask, hub):
    first = ask(NAME)
    folder = Path(first.stdout.strip())
    assert folder.is_dir(), first.stderr
    loaded = {"config.json", "tokenizer.json", "model-00001-of-00001.safetensors", "merges.txt", "tool_use.jinja"}
    assert {file.name for file in folder.rglob("*") if file.is_file()} == loaded
    assert (folder / "model-00001-of-00001.safetensors").read_bytes() == b"weights"
    assert model_name(folder) == NAME

    hub[1].clear()
    assert ask(NAME, HF_HUB_OFFLINE="1").stdout == first.stdout
    assert not hub[1]


def test_random_weights_need_no_download_of_real_ones(ask, hub):
    folder = Path(ask(NAME, weights=False).stdout.strip())
    assert (folder / "config.json").is_file()
    assert not any("safetensors" in path for path in hub[1])


@pytest.mark.parametrize("variables", [{}, {"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}], ids=str)
def test_what_the_hub_does_not_give_is_told_in_one_line(ask, variables):
    failed = ask("nobody/nothing", **variables)
    (last,) = failed.stderr.strip().splitlines()[-1:]
    assert last.startswith("FileNotFoundError: nobody/nothing is no folder here") and "HF_TOKEN" in last


def test_folders_are_taken_as_they_are(tmp_path, monkeypatch):
    (tmp_path / "models" / "llama").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert model_folder("models/llama") == Path("models/llama")  # though it could be a name of the hub
    assert model_folder("/no/such/folder") == Path("/no/such/folder")  # whoever reads it says what is missing
    monkeypatch.setenv("HOME", str(tmp_path))
    assert model_folder("~/models") == tmp_path / "models"


def test_a_folder_is_named_however_it_is_written(tmp_path, monkeypatch):
    assert model_name("/data/Llama-3.1-8B") == model_name("/data/Llama-3.1-8B/") == "Llama-3.1-8B"
    inside = tmp_path / "my-model" / "part"
    inside.mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "my-model")
    names = [model_name(path) for path in (".", "./", "part/..", "../my-model", "part/", "./part/.")]
    assert names == ["my-model"] * 4 + ["part"] * 2
    monkeypatch.chdir(inside)
    assert model_name("..") == "my-model"
    (tmp_path / "latest").symlink_to(inside)
    assert model_name(tmp_path / "latest") == "latest"
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    monkeypatch.chdir(snapshot)
    assert model_name(".") == "org/name"
    assert model_name("/") == "/"
