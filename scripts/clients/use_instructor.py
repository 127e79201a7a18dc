"""instructor in its default mode, which forces the call of a tool."""

from __future__ import annotations

from typing import Any

import instructor
from openai import OpenAI

from scripts.clients.shared import KEY, MESSAGES, TIMEOUT_S, Colour, Server, require

PACKAGE = "instructor"


def client_of(server: Server) -> Any:
    return instructor.from_openai(OpenAI(base_url=server.openai_url, api_key=KEY, timeout=TIMEOUT_S, max_retries=0))


def default_mode(server: Server) -> None:
    """the default mode."""
    how: dict[str, Any] = dict(model=server.model, messages=list(MESSAGES), max_retries=0)
    colour = client_of(server).chat.completions.create(response_model=Colour, **how)
    require(isinstance(colour, Colour), colour)


def partial(server: Server) -> None:
    """the default mode, streamed."""
    how: dict[str, Any] = dict(model=server.model, messages=list(MESSAGES), max_retries=0)
    *_, colour = client_of(server).chat.completions.create_partial(response_model=Colour, **how)
    require(getattr(colour, "colour", None) in ("red", "blue"), colour)


CHECKS = [default_mode, partial]
