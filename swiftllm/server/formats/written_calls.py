"""Calls of tools in whole texts, in each form that models write. A text that has not the form holds none."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from swiftllm.server.formats.arguments import typed_arguments
from swiftllm.server.formats.json_text import DECODER, is_text, object_of

Call = tuple[str, str]
"""Name of the tool, and its arguments in JSON."""
Tools = Mapping[str, dict[str, Any]]
"""The JSON schema of each tool's arguments."""

FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>")
PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>")
END_OF_VALUE = re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>))")
END_OF_FUNCTION = re.compile(r"\s*</function>\s*")
NAME_LINE = re.compile(r"\s*([\w.:-]+)[ \t]*\r?\n\s*(?=\{)")
BEGUN_NAME_LINE = re.compile(r"([\w.:-]*)([ \t]*(?:\r?\n?\s*)?)")
TURNS = re.compile(r"\s*(?:<\|(?:assistant|observation)\|>\s*)*")  # GLM-4's marks between calls


def read_json(text: str, tools: Tools) -> list[Call] | None:
    """Calls written as JSON objects, one after another, in a list, or with semicolons between them.

    Of a list that was cut within a call, the calls before that one.
    """
    place, found = 0, list[Call]()
    is_list = text.lstrip().startswith("[")
    between = " \t\r\n;" + (",[]" if is_list else "")
    while place < len(text):
        if text[place] in between:
            place += 1
            continue
        try:
            value, place = DECODER.raw_decode(text, place)
        except (ValueError, RecursionError):
            return found if found and is_list and text[place] == "{" else None
        call = call_of(value)
        if call is None:
            return None
        found.append(call)
    return found or None


def call_of(item: Any) -> Call | None:
    """The call that an object describes, if it does."""
    if not isinstance(item, dict) or not isinstance(item.get("name"), str) or not item["name"]:
        return None
    if not is_text(item["name"]):
        return None
    if not item.keys() & {"arguments", "parameters"} and item.keys() - {"name", "id", "type"}:
        return None  # an answer about something that has a name
    arguments = item.get("arguments", item.get("parameters"))
    if isinstance(arguments, str):
        return (item["name"], arguments) if is_text(arguments) and object_of(arguments) is not None else None
    if arguments is not None and not isinstance(arguments, dict):
        return None
    return item["name"], as_text(arguments or {})


def as_text(arguments: dict[str, Any]) -> str:
    """Arguments in JSON, with letters as they are where they can be sent."""
    text = json.dumps(arguments, ensure_ascii=False)
    return text if is_text(text) else json.dumps(arguments)


def read_mistral(text: str, tools: Tools) -> list[Call] | None:
    """A list of calls, or since version 11 `name[ARGS]{...}`, one after another."""
    if "[ARGS]" not in text:
        return read_json(text, tools)
    found = []
    for written in text.split("[TOOL_CALLS]"):
        name, _, arguments = written.partition("[ARGS]")
        if not name.strip() or object_of(arguments) is None:
            return None
        found.append((name.strip().partition("[CALL_ID]")[0], arguments.strip()))
    return found


def read_functions(text: str, tools: Tools) -> list[Call] | None:
    """`<function=NAME><parameter=KEY>VALUE</parameter>...</function>`, one after another. Values are plain text; the
    tool's schema tells what they are. Of functions of which the last was cut, those before it."""
    place, found = 0, list[Call]()
    while place < len(text):
        head = FUNCTION.match(text, place)
        if head is None:
            return None
        place, values = head.end(), dict[str, str]()
        while (parameter := PARAMETER.match(text, place)) and (end := END_OF_VALUE.search(text, parameter.end())):
            values[parameter[1].strip()] = text[parameter.end() : end.start()].removeprefix("\n").removesuffix("\n")
            place = end.end()
        end = END_OF_FUNCTION.match(text, place)
        if end is None:
            was_cut = "</function>" not in text[place:]
            return (found or None) if was_cut else None
        name, place = head[1].strip(), end.end()
        found.append((name, as_text(typed_arguments(values, tools.get(name, {})))))
    return found or None


def is_within_value(text: str) -> bool:
    """Whether a beginning of functions ends within a value."""
    return text.rfind("<parameter=") > text.rfind("</parameter>")


def read_name_lines(text: str, tools: Tools) -> list[Call] | None:
    """The name of a tool in a line, and its arguments in JSON behind it. Of several of which the last was cut, those
    before it."""
    place, found = 0, list[Call]()
    while (turn := TURNS.match(text, place)) is not None and (place := turn.end()) < len(text):
        head = NAME_LINE.match(text, place)
        if head is None or (tools and head[1] not in tools):
            return None
        try:
            arguments, place = DECODER.raw_decode(text, head.end())
        except (ValueError, RecursionError):
            return found or None
        found.append((head[1], as_text(arguments)))
    return found or None


def begins_name_line(text: str, tools: Tools) -> bool | None:
    """Whether a text begins as :func:`read_name_lines` reads it; None: the rest of it decides."""
    head = NAME_LINE.match(text)
    if head is not None:
        return not tools or head[1] in tools
    begun = BEGUN_NAME_LINE.fullmatch(text)
    if begun is None or (begun[2] and not begun[1]):
        return False
    is_possible = begun[1] in tools if begun[2] else any(name.startswith(begun[1]) for name in tools)
    return None if is_possible or not tools else False
