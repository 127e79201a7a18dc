"""Fields of a generation request that the server does not read: some are refused, the others ignored.

Clients send many fields, so unknown ones are ignored, with a line in the log. Known ones that would change the output
and are not implemented are refused, unless they have a value without effect.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from swiftllm.server.api.errors import ApiError

logger = logging.getLogger(__name__)

MAX_IGNORED_LOGGED = 100  # bounds the log: clients choose these names
MAX_LOGGED_CHARS = 100  # of one name

# Parameters that change the output and are not implemented, each with its values without effect (besides null).
NOT_IMPLEMENTED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "ebnf": ("",),
    "echo": (False,),
    "format": ("",),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "grammar": ("",),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "json_schema": ({},),
    "length_penalty": (1,),
    "logprob_token_ids": ([],),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "output_format": (),
    "prompt_embeds": (),
    "regex": ("",),
    "repetition_detection": (),
    "response_schema": (),
    "return_tokens_as_token_ids": (False,),
    "structural_tag": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
    "web_search_options": (),
}

_ignored: set[str] = set()  # names already logged


def check_unsupported_fields(fields: Mapping[str, Any]) -> None:
    """Log unknown fields, and refuse those not implemented.

    Tools that must not be called (``tool_choice`` is "none") need no parser, and are no part of the prompt.

    Raises:
        ApiError: one of the fields is not implemented.
    """
    has_tools = fields.get("tool_choice") != "none"
    for name, value in fields.items():
        if name == "tools" and not has_tools:
            continue
        harmless = NOT_IMPLEMENTED.get(name)
        if harmless is None:
            log_ignored_field(name)
        else:
            refuse(name, value, harmless)


def refuse(name: str, value: Any, harmless: Sequence[Any]) -> None:
    """Check that a field that is not implemented has a value without effect.

    Raises:
        ApiError: it has another one.
    """
    if value is not None and value not in harmless:
        raise ApiError(400, f"{name} is not implemented: leave it out", name, "unsupported_parameter")


def log_ignored_field(name: str) -> None:
    name = name[:MAX_LOGGED_CHARS]
    if name not in _ignored and len(_ignored) < MAX_IGNORED_LOGGED:
        _ignored.add(name)
        logger.warning("a request has the parameter %r, which is unknown and ignored (logged once)", name)
