"""What the bodies of the translated APIs have in common."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from swiftllm.server.api.contract.parsing import parse_body
from swiftllm.server.api.contract.protocol import ChatRequest, GenerationRequest, TextPart
from swiftllm.server.api.contract.unsupported import refuse
from swiftllm.server.api.errors import ApiError

logger = logging.getLogger(__name__)

MAX_LEFT_OUT_LOGGED = 100  # bounds the log: clients choose these types
_left_out: set[str] = set()  # types already logged

CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}
"""Chat's fields for a conversation whose last message is to be continued."""
REFUSED: Mapping[str, tuple[Any, ...]] = {"n": (1,), "prompt_logprobs": (), "return_token_ids": (False,)}


class TranslatedRequest(GenerationRequest):
    """A body of another API. The fields of :class:`GenerationRequest` are taken as in chat."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields that would change the answer and are not implemented, each with its values without effect."""
    names: ClassVar[Mapping[str, str]] = {}
    """Chat's fields by the names that this API has for them."""

    def check_fields(self) -> None:
        for name, harmless in {**REFUSED, **self.refused}.items():
            refuse(name, getattr(self, name, None), harmless)
        super().check_fields()

    def chat_fields(self) -> dict[str, Any]:
        """The fields of a chat body that has the same meaning.

        Raises:
            ApiError: something in it is not implemented, or missing.
        """
        raise NotImplementedError

    def as_chat(self) -> ChatRequest:
        """The chat body with the same meaning.

        Raises:
            ApiError: something in it is not implemented, missing, or outside its range.
        """
        shared = self.model_fields_set & GenerationRequest.model_fields.keys() - REFUSED.keys() - {"stream_options"}
        own = {name: value for name, value in self.chat_fields().items() if value is not None}
        for name in self.names.keys() & shared & own.keys():
            if getattr(self, name) is not None:
                own_name = self.name_of(name)
                raise ApiError(400, f"give one of {own_name} and {name}", own_name, "invalid_value")
        chat = parse_body(ChatRequest, {name: getattr(self, name) for name in shared} | own)
        chat.check_fields()
        return chat

    def name_of(self, field: str | None) -> str | None:
        """This API's name of a field of chat, if that is another one."""
        return self.names.get(field or "")

    @contextmanager
    def own_names(self) -> Iterator[None]:
        """Errors raised inside say this API's names of fields."""
        try:
            yield
        except ApiError as error:
            name = self.name_of(error.param)
            if name is not None:
                error.message, error.param = error.message.replace(error.param or "", name, 1), name
            raise


def required(value: Any, where: str, param: str) -> Any:
    """A value that must be there.

    Raises:
        ApiError: it is None.
    """
    if value is None:
        raise ApiError(400, f"{where}: Field required", param, "missing")
    return value


def not_implemented(where: str, kind: str, param: str) -> ApiError:
    """The error for an item, block or tool of a type that this server does not have."""
    return ApiError(400, f"{where}: type {kind[:100]!r} is not implemented", param, "unsupported_parameter")


def log_left_out(kind: str) -> None:
    """Say in the log, once for each type, that tools of a type are left out: coding agents send some by default."""
    kind = kind[:100]
    if kind not in _left_out and len(_left_out) < MAX_LEFT_OUT_LOGGED:
        _left_out.add(kind)
        logger.warning(
            "a request has a tool of type %r, which is left out: only functions are done (logged once)", kind
        )


def text_of(content: str | Sequence[str | TextPart] | None, where: str, param: str) -> str:
    """A text that came whole or in parts.

    Raises:
        ApiError: one of the parts is not text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif part.content is not None:
            texts.append(part.content)
        else:
            raise not_implemented(where, part.type, param)
    return "".join(texts)
