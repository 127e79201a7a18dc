"""A client's connection: uvicorn's, with a limit on header bytes and a deadline at shutdown."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from swiftllm.server.api.errors import ApiError

MAX_HEADER_BYTES = 64 * 1024  # browsers and proxies stay far below
LAST_BYTES_TIMEOUT_S = 5.0  # that clients get to read the last bytes after all requests have ended


class LimitedConnection(HttpToolsProtocol):
    """Limits the bytes of request line and headers, and closes when the server shuts down.

    Without the limit uvicorn's parser keeps headers of any size in memory, and takes quadratic time for a long one.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._num_bytes = 0  # read since the last byte of a body

    def on_body(self, body: bytes) -> None:
        self._num_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_bytes = 0
        super().on_message_complete()

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
