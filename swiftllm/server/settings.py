"""Where the server listens and whom it lets in: frozen values, the help text beside each field (the CLI shows it)."""

from __future__ import annotations

import re
from dataclasses import dataclass

ORIGIN = re.compile("[a-z-]+://[^/]+")  # extensions of browsers have schemes of their own


@dataclass(frozen=True)
class ServerSettings:
    """The HTTP side of a server.

    Raises:
        ValueError: a field lies outside its range; the message names the field and the value.
    """

    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 is every interface of this machine."""
    port: int = 8000
    """Port to listen at; 0 takes any that is free."""
    served_model_name: str | None = None
    """What clients call the model; by default the name of its folder."""
    api_key: str | None = None
    """Clients must send it as `Authorization: Bearer KEY`; by default anybody may come in."""
    allowed_origins: tuple[str, ...] = ()
    """Websites whose pages may call the server from a browser, such as http://localhost:3000; * is all of them."""
    max_body_bytes: int = 4 * 2**20
    """Size of a request's body at most; reading a large one holds up all streams."""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ValueError(f"port={self.port!r} must be in 0..65535")
        for origin in self.allowed_origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ValueError(f"allowed_origins={origin!r} must be * or like http://localhost:3000, without a path")
        if self.max_body_bytes < 1:
            raise ValueError(f"max_body_bytes={self.max_body_bytes!r} must be at least 1")
        if self.api_key is not None and not self.api_key:
            raise ValueError("api_key is empty: give one, or leave it out to let anybody in")
