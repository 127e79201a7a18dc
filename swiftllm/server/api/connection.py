"""A client's connection: uvicorn's, with limits on header bytes and on unread answers, and a deadline at shutdown."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from swiftllm.server.api.errors import ApiError

MAX_HEADER_BYTES = 64 * 1024  # browsers and proxies stay far below
LAST_BYTES_TIMEOUT_S = 5.0  # that clients get to read the last bytes after all requests have ended
UNREAD_TIMEOUT_S = 60.0  # that a client may leave a full buffer unread, where requests have no timeout

logger = logging.getLogger("uvicorn.error")


class ClientConnection(HttpToolsProtocol):
    """Limits the bytes of request line and headers, and closes when the server shuts down.

    Without the limit uvicorn's parser keeps headers of any size in memory, and takes quadratic time for a long one. A
    client that leaves its answer unread is dropped: a stream would keep its KV blocks until it ends.
    """

    def __init__(self, *arguments: Any, unread_timeout_s: float = UNREAD_TIMEOUT_S, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._num_bytes = 0  # read since the last byte of a body
        self._unread_timeout_s = unread_timeout_s
        self._drop: asyncio.TimerHandle | None = None  # while the buffer is full

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._drop is None:
            self._drop = asyncio.get_running_loop().call_later(self._unread_timeout_s, self._drop_client)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._keep_client()

    def connection_lost(self, exc: Exception | None) -> None:
        self._keep_client()
        super().connection_lost(exc)

    def _keep_client(self) -> None:
        if self._drop is not None:
            self._drop.cancel()
            self._drop = None

    def _drop_client(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        logger.warning(
            "%s is dropped: it has left %d bytes unread for %g s", self.client, waiting, self._unread_timeout_s
        )
        self.transport.abort()

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
