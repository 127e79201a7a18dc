"""A client's connection: uvicorn's, with a limit on header bytes, whole bodies, and a deadline at shutdown."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from swiftllm.server.api.errors import ApiError
from swiftllm.server.api.request_starts import likely_class

MAX_HEADER_BYTES = 64 * 1024  # browsers and proxies stay far below
MAX_WAITING_BODY_BYTES = 64 * 1024  # uvicorn reads no further before the application asks for more
LAST_BYTES_TIMEOUT_S = 5.0  # that clients get to read the last bytes after all requests have ended
LIKELY_CLASS = "swiftllm.likely_class"  # key in an ASGI scope; absent if the request began before its body was there


class ClientConnection(HttpToolsProtocol):
    """Limits the bytes of request line and headers, and closes when the server shuts down.

    Without the limit uvicorn's parser keeps headers of any size in memory, and takes quadratic time for a long one.

    A request begins when its body is complete, or holds ``MAX_WAITING_BODY_BYTES``. So its likely service class is
    known, and thousands of best-effort requests cost little until their turn comes.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._num_bytes = 0  # read since the last byte of a body
        self._unstarted: tuple[Any, Any] | None = None  # uvicorn's cycle and application, before the body is complete

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        if cycle.more_body and not cycle.waiting_for_100_continue and len(cycle.body) <= MAX_WAITING_BODY_BYTES:
            self._unstarted = cycle, app
        else:
            super()._start_asgi_task(cycle, app)

    def _start_request(self) -> None:
        if self._unstarted is not None:
            unstarted, self._unstarted = self._unstarted, None
            super()._start_asgi_task(*unstarted)

    def on_body(self, body: bytes) -> None:
        self._num_bytes = 0
        super().on_body(body)
        if len(self.cycle.body) > MAX_WAITING_BODY_BYTES:
            self._start_request()

    def on_message_complete(self) -> None:
        self._num_bytes = 0
        super().on_message_complete()
        if self._unstarted is not None:
            self.scope[LIKELY_CLASS] = likely_class(self.cycle.body)
            self._start_request()

    def data_received(self, data: bytes) -> None:
        self._num_bytes += len(data)
        super().data_received(data)
        if self._num_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            message = f"request line and headers exceed the {MAX_HEADER_BYTES} bytes that this server reads"
            self._close_with(ApiError(431, message, code="headers_too_large"))

    def shutdown(self) -> None:
        """Close the connection: the server shuts down and all requests it has read have ended."""
        if (
            self.cycle is not None and self.cycle.more_body and not self.cycle.response_complete
        ):  # the rest of the body may never come
            self._close_with(ApiError(503, "the server is shutting down", code="not_serving"))
        else:
            super().shutdown()
        asyncio.get_running_loop().call_later(LAST_BYTES_TIMEOUT_S, self.transport.abort)

    def _close_with(self, error: ApiError) -> None:
        is_answering = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        if not is_answering:
            body = error.response().body
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()
