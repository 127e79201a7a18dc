"""Address and access rules of the server: frozen values. The CLI shows the text below each field as its help."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from swiftllm.files import expand
from swiftllm.model.folder import sampling_defaults
from swiftllm.model.tokenizer import Tokenizer
from swiftllm.server.answer_formats import Formats, is_harmony, reasons
from swiftllm.server.tool_calls import FORMATS, format_of, has_tools

ORIGIN = re.compile("[a-z-]+://[^/]+")  # browser extensions have their own schemes


@dataclass(frozen=True)
class ServerSettings:
    """Address and access rules of a server.

    Raises:
        ValueError: a field lies outside its range; the message names the field and the value.
    """

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every interface of this machine."""
    port: int = 8000
    """Port to listen on; 0 takes any free port."""
    served_model_name: tuple[str, ...] = ()
    """Names of the model for clients, of which answers have the first; by default the name of the model's folder. The
    MODEL that is served is always one, too."""
    api_key: str | None = None
    """Key that clients must send as `Authorization: Bearer KEY`; by default no key is required."""
    allowed_origins: tuple[str, ...] = ()
    """Origins whose web pages may call the server from a browser (CORS), such as http://localhost:3000; * is all."""
    chat_template: str | None = None
    """File with a chat template (Jinja), in place of the model's own."""
    generation_config: Literal["auto", "none"] = "auto"
    """auto takes temperature, top_p, top_k, min_p, repetition_penalty and max_new_tokens of the model's
    generation_config.json where a request sets none; none takes OpenAI's defaults."""
    tool_call_parser: str = "auto"
    """Form of the model's tool calls: hermes, llama3_json, mistral, granite, qwen3_coder, seed_oss, glm4 or json; auto
    goes by its chat template. With none, only tools that must be called are taken."""
    reasoning_parser: Literal["auto", "none", "think"] = "auto"
    """Form of the model's reasoning, which answers show apart from their content; auto goes by its chat template."""
    max_body_bytes: int = 4 * 2**20
    """Maximum size of a request body; reading a large one delays all streams."""

    def __post_init__(self) -> None:
        if isinstance(self.served_model_name, str):
            object.__setattr__(self, "served_model_name", (self.served_model_name,))
        if "" in self.served_model_name:
            raise ValueError("served_model_name has an empty name: leave it out to take the folder's")
        if not 0 <= self.port < 2**16:
            raise ValueError(f"port={self.port!r} must be in 0..65535")
        for origin in self.allowed_origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ValueError(f"allowed_origins={origin!r} must be * or like http://localhost:3000, without a path")
        if self.max_body_bytes < 1:
            raise ValueError(f"max_body_bytes={self.max_body_bytes!r} must be at least 1")
        for name, more in (("generation_config", ()), ("tool_call_parser", FORMATS), ("reasoning_parser", ("think",))):
            if (value := getattr(self, name)) not in (known := ("auto", "none", *more)):
                raise ValueError(f"{name}={value!r} must be one of {', '.join(known)}")
        self.read_chat_template()
        if self.api_key is not None and not self.api_key:
            raise ValueError("api_key is empty: give one, or leave it out to require none")

    def sampling_defaults(self, model: str) -> dict[str, float]:
        """The model's own sampling parameters, if requests get them. ``model``: its folder."""
        return sampling_defaults(model) if self.generation_config == "auto" else {}

    def formats(self, tokenizer: Tokenizer | None) -> Formats:
        """How the model writes calls of tools and reasoning."""
        template = self.read_chat_template() or (tokenizer.chat_template if tokenizer else "")
        if self.tool_call_parser == self.reasoning_parser == "auto" and is_harmony(template):
            return Formats(is_harmony=True)
        named = FORMATS.get(self.tool_call_parser)
        calls = format_of(template) if self.tool_call_parser == "auto" else named
        thinks = reasons(template) if self.reasoning_parser == "auto" else self.reasoning_parser == "think"
        is_unknown = self.tool_call_parser == "auto" and calls is None and has_tools(template)
        return Formats(calls, thinks, has_unknown_calls=is_unknown)

    def read_chat_template(self) -> str | None:
        """The text of ``chat_template``, if that is set."""
        if self.chat_template is None:
            return None
        try:
            return expand(self.chat_template).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeError) as error:
            raise ValueError(f"chat_template={self.chat_template!r} cannot be read: {error}") from None
