"""Connects to running OpenAI-compatible servers: waits until they are ready and asks for their model."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

PROBE_TIMEOUT_S = 5.0
POLL_EVERY_S = 0.25
SHOWN_CHARS = 200


class ServerNotReady(ConnectionError):
    """No usable server; the message says what to start."""


@dataclass(frozen=True)
class Server:
    """A running server as it describes itself; ``name`` is its name in results.

    ``max_model_len`` (tokens) and ``version`` are None if the server does not report them.
    """

    name: str
    url: str
    model: str
    max_model_len: int | None = None
    version: str | None = None


def still_running() -> str | None:
    """The default ``ended``: whether a server started elsewhere has ended is unknown."""


def connect_server(
    name: str,
    url: str,
    ready_timeout_s: float = 60.0,
    expected: Server | None = None,
    ended: Callable[[], str | None] = still_running,
) -> Server:
    """Wait until the server at ``url`` (no trailing /v1) is ready, and ask for its model.

    ``ended`` returns the reason why the server will never be ready, or None.

    Raises:
        ServerNotReady: the server is not ready in time, not OpenAI-compatible, or not the ``expected`` one; the message
            says what to do.
    """
    deadline = time.monotonic() + ready_timeout_s
    # The environment's proxies are ignored: the measurement would include them.
    with httpx.Client(base_url=url, timeout=PROBE_TIMEOUT_S, trust_env=False) as client:
        while (reason := why_not_ready(client)) is not None:
            if end := ended():
                raise ServerNotReady(f"{name}: {end} before it was ready")
            if time.monotonic() >= deadline:
                raise ServerNotReady(
                    f"{name}: no server ready at {url} within {ready_timeout_s:g} s ({reason}); start one, for example "
                    f"`vllm serve MODEL --port {port_of(url)}`, and run the same command again"
                )
            time.sleep(POLL_EVERY_S)
        try:
            model = ask(client, "/v1/models")["data"][0]
            served, max_model_len = str(model["id"]), model.get("max_model_len")
        except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ServerNotReady(
                f"{name}: {url} is no OpenAI-compatible server with a model: GET /v1/models gives {error!r}; check the "
                f"address, or start one, for example `vllm serve MODEL --port {port_of(url)}`"
            ) from error
        try:
            version = str(ask(client, "/version")["version"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            version = None
    server = Server(name, url, served, max_model_len, version)
    if expected is not None and server != expected:
        raise ServerNotReady(f"{name}: the server at {url} is another one than before: was {expected}, is {server}")
    return server


def why_not_ready(client: httpx.Client) -> str | None:
    """None if the server is ready, else the reason. A server without /health is ready when it lists models."""
    try:
        for path in ("/health", "/v1/models"):
            answer = client.get(path)
            if answer.status_code != httpx.codes.NOT_FOUND:
                break
    except httpx.TransportError as error:
        return str(error) or type(error).__name__
    return None if answer.is_success else f"GET {path}: {refusal(answer)}"


def ask(client: httpx.Client, path: str) -> Any:
    return client.get(path).raise_for_status().json()


def port_of(url: str) -> int:
    return httpx.URL(url).port or 8000


def refusal(answer: httpx.Response) -> str:
    """An error response as one line. Its body must have been read."""
    with contextlib.suppress(ValueError):
        return f"HTTP {answer.status_code}: {error_message(answer.json())}"
    return f"HTTP {answer.status_code}: {answer.text[:SHOWN_CHARS] or answer.reason_phrase}"


def error_message(body: Any) -> str:
    """The message of an OpenAI error body, or of a similar one."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:SHOWN_CHARS]
