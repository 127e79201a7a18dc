"""Downloads: a file is there whole or not at all, and a missing reader is named before anything is fetched."""

from __future__ import annotations

import importlib.util
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from apex.workloads.sources import download, read_parquet


@pytest.fixture
def address():
    """A server that announces ten bytes: /whole sends them, any other page ends after four."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", "10")
            self.end_headers()
            self.wfile.write(b"0123456789" if self.path == "/whole" else b"0123")

        def log_message(self, *words):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_download_is_whole_or_fails(address, tmp_path):
    download(f"{address}/whole", tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"0123456789"
    with pytest.raises(OSError, match="short ended after 4 of 10 bytes"):
        download(f"{address}/short", tmp_path / "file")


def test_missing_parquet_reader_is_told_before_anything_is_fetched(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="pip install pyarrow"):
        read_parquet("some/dataset", "test", ["prompt"], tmp_path)
