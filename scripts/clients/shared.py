"""What the clients are asked. The model may be weak: forms are judged, not what it says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

KEY = "none"
QUESTION = "What is the weather in Paris?"
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
MAX_TOKENS = 200
WEATHER = "Sunny, 21 degrees"
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Server:
    """``url`` is without `/v1`."""

    url: str
    model: str

    @property
    def openai_url(self) -> str:
        return f"{self.url}/v1"


class Colour(BaseModel):
    """A colour."""

    colour: Literal["red", "blue"]


class Place(BaseModel):
    """Where the weather is wanted."""

    city: Literal["Paris", "Rome"]


class WeatherTool:
    """The tool that clients give to the model: it notes the cities that it was asked for."""

    def __init__(self) -> None:
        self.cities: list[str] = []

    def __call__(self, city: str) -> str:
        self.cities.append(Place(city=city).city)  # raises if the arguments do not fit their schema
        return WEATHER


def require(condition: object, about: object) -> None:
    """Check what a client returned.

    Raises:
        AssertionError: it has not the form that it should have; the message shows ``about``.
    """
    if not condition:
        raise AssertionError(f"unexpected: {about!r}")


def require_text(text: object) -> None:
    """Check that a client returned a text that is not empty."""
    require(isinstance(text, str) and text, text)
