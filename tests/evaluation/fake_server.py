"""An OpenAI-compatible server on a real socket that behaves, or misbehaves, as a test wants."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Exchange(BaseHTTPRequestHandler):
    """One request. Behaviours answer with ``start``, ``chunk``, ``event``, ``done`` and ``refuse``."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        status, body = self.server.pages.get(self.path, (404, {"detail": "Not Found"}))
        self.refuse(status, body)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            index = len(self.server.requests)
            self.server.requests.append((time.monotonic(), body))
        self.server.behave(self, body, index)

    def refuse(self, status: int, body: object, **headers: str) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def start(self, content_type: str = "text/event-stream; charset=utf-8") -> None:
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def event(self, data: object) -> None:
        text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
        packed = f"data: {text}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(packed), packed))

    def chunk(self, text: str, reason: str | None = None, count: int | None = None) -> None:
        usage = {} if count is None else {"usage": {"completion_tokens": count}}
        self.event({"choices": [{"index": 0, "text": text, "finish_reason": reason}], **usage})

    def done(self, count: int | None) -> None:
        """Send the last events; the usage reports ``count`` tokens."""
        if count is not None:
            self.event({"choices": [], "usage": {"completion_tokens": count}})
        self.event("[DONE]")
        self.end()

    def end(self) -> None:
        self.wfile.write(b"0\r\n\r\n")

    def disconnect(self) -> None:
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


Behaviour = Callable[[Exchange, dict, int], None]


def token_by_token(exchange: Exchange, body: dict, index: int) -> None:
    """Send a chunk for each token with the count so far, as vLLM does."""
    exchange.start()
    wanted = body["max_tokens"]
    for number in range(1, wanted + 1):
        exchange.chunk("a", "length" if number == wanted else None, number)
    exchange.done(wanted)


class FakeServer(ThreadingHTTPServer):
    """Listens once constructed, and serves as a context manager. ``requests`` are (time, body) of every POST."""

    request_queue_size = 128
    daemon_threads = True

    def __init__(self, behave: Behaviour = token_by_token, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Exchange)
        self.behave = behave
        self.lock = threading.Lock()
        self.requests: list[tuple[float, dict]] = []
        self.pages: dict[str, tuple[int, object]] = {
            "/health": (200, ""),
            "/version": (200, {"version": "9.9"}),
            "/v1/models": (200, {"data": [{"id": "some/Tiny-Llama", "max_model_len": 4096}]}),
        }

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> FakeServer:
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: object) -> None:
        """Ignore errors of clients that disconnected, which the tests cause on purpose."""


if __name__ == "__main__":  # as a separate process: python -m tests.evaluation.fake_server --host HOST --port PORT
    FakeServer(port=int(sys.argv[sys.argv.index("--port") + 1])).serve_forever()
