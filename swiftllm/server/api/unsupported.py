"""Fields of a generation request that nothing here reads: some are refused, the others ignored.

Clients send all sorts of fields, so those nobody knows are let in. Those that would change the output and are not
implemented are refused by name, unless they have the value that changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from swiftllm.server.api.errors import ApiError

logger = logging.getLogger(__name__)

MAX_IGNORED_NOTES = 100  # in the log: clients choose these names

# Parameters that change the output and are not implemented, each with the values that leave it as it is (beside null).
NOT_IMPLEMENTED: Mapping[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}

_ignored: set[str] = set()  # those the log has named already


def check_extras(fields: Mapping[str, Any]) -> None:
    """
    Raises:
        ApiError: one of them is not implemented.
    """
    for name, value in fields.items():
        harmless = NOT_IMPLEMENTED.get(name)
        if harmless is None:
            note_ignored(name)
        elif value is not None and value not in harmless:
            raise ApiError(400, f"{name} is not implemented: leave it out", name, "unsupported_parameter")


def note_ignored(name: str) -> None:
    if name not in _ignored and len(_ignored) < MAX_IGNORED_NOTES:
        _ignored.add(name)
        logger.warning("a request has the parameter %r, which is unknown here and ignored (said once)", name)
