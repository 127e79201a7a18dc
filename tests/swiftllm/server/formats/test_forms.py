"""Forms of calls: known by the marks of real chat templates or not at all, and read as vLLM's parsers read them."""

from __future__ import annotations

import json
import re

import pytest

from swiftllm.server.answer_formats import Formats
from swiftllm.server.settings import ServerSettings
from swiftllm.server.tool_calls import FORMATS, CallReader, Part, Reader, format_of, joined

TOOLS = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
TEMPLATES = {
    "Qwen3": ("hermes", '<tools>{T}</tools> <tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}'),
    "Qwen3-Coder": ("qwen3_coder", "<tools>{T}</tools>\n<tool_call>\n<function=example>\n<parameter=p>\nvalue\n"),
    "GLM-4.5": (None, "[gMASK]<sop>{T}<tool_call>{name}\n<arg_key>{key}</arg_key>\n<|observation|>"),
    "GLM-4-0414": ("glm4", "[gMASK]<sop>{% if tools %}<|system|>\n# 可用工具{T}{% endif %}{{ message.metadata }}"),
    "Seed-OSS": ("seed_oss", "{T}<seed:tool_call>\n<function=example>\n<parameter=p>value</parameter>"),
    "Granite 3.0": ("granite", "<|start_of_role|>available_tools<|end_of_role|>{T}"),
    "Granite 3.3": ("granite", "<|start_of_role|>system<|end_of_role|>{T} respond only with <|tool_call|> and a list"),
    "Granite 4": ("hermes", '<|start_of_role|>available_tools{T}<tool_call>\n{"name": <name>}\n</tool_call>'),
    "Mistral": ("mistral", "[AVAILABLE_TOOLS]{T}[/AVAILABLE_TOOLS][INST]{{ m }}[/INST][TOOL_CALLS]"),
    "Llama 3.1": ("llama3_json", "<|start_header_id|>{T}<|python_tag|>{{ message.tool_calls | length }}"),
    "Llama 3.2": ("llama3_json", '<|start_header_id|>{T}{"name": function name, "parameters": dictionary}'),
    "Nemotron of Llama 3.1": (None, '<|start_header_id|>{T}<TOOLCALL>[{"name": ...}]</TOOLCALL>'),
    "Phi-4-mini": (None, "<|system|>{% if tools %}<|tool|>{T}<|/tool|>{% endif %}<|end|>"),
    "Llama 4": (None, "<|header_start|>system<|header_end|>{T} [func_name(a=b)]<|python_start|>"),
    "no tools": (None, "<|im_start|>{{ message.role }} <tool_call>"),
}


@pytest.mark.parametrize("family", TEMPLATES)
def test_the_form_of_calls_is_known_by_its_own_marks_or_not_at_all(family: str, tmp_path) -> None:
    name, template = TEMPLATES[family]
    (tmp_path / "template").write_text(text := template.replace("{T}", TOOLS))
    formats = ServerSettings(chat_template=str(tmp_path / "template")).formats(None)
    found = format_of(text)
    assert (found and found.name) == formats.calls_name == name
    assert formats.has_unknown_calls is (name is None and "tools" in text)


P = {
    "city": {"type": "string"}, "n": {"type": "integer"}, "x": {"type": "number"}, "b": {"type": "boolean"},
    "o": {"type": "object"}, "l": {"type": "array"}, "s0": {"type": ["string", "null"]}, "e": {"enum": [1, 2]},
    "u": {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "r": {"$ref": "#/$defs/D"}, "any": {},
    "z": {"const": "1"}, "opt": {"anyOf": [{"type": "string"}, {"type": "null"}]},
}  # fmt: skip
LOOK = {"look": {"type": "object", "properties": P, "$defs": {"D": {"type": "integer"}}}, "g": {}}


def read(reader: Reader, pieces: list[str]) -> list[Part]:
    return joined([part for piece in pieces for part in reader.push(piece)] + reader.finish())


def without_ids(parts: list[Part]) -> list[Part]:
    return [part._replace(call_id="") for part in parts]


def calls_in(parts: list[Part]) -> list[tuple[str, dict]]:
    return [(part.name, json.loads(part.text)) for part in parts if part.kind == "tool_call"]


def contents(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if part.kind == "content")


def function(name: str = "look", **values: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<function={name}>\n{parameters}</function>"


@pytest.mark.parametrize("form", ["qwen3_coder", "seed_oss"])
@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("city", "Oslo", "Oslo"), ("city", "5", "5"), ("city", "null", "null"), ("city", "", ""),
        ("city", "two\n\nlines <b> </tool_call> </parameter> & \"", "two\n\nlines <b> </tool_call> </parameter> & \""),
        ("city", "\n a \n", "\n a \n"),
        ("n", "5", 5), ("n", " -5 ", -5), ("n", "5.0", 5), ("n", "five", "five"), ("n", "null", None),
        ("n", "true", "true"),
        ("x", "5", 5), ("x", "0.5", 0.5), ("x", "1e3", 1000.0), ("x", "", ""),
        ("b", "true", True), ("b", "False", False), ("b", "yes", "yes"),
        ("o", '{"a": [1, null]}', {"a": [1, None]}), ("o", "{'a': True, 'b': None}", {"a": True, "b": None}),
        ("o", "{1, 2}", "{1, 2}"), ("o", "[1]", "[1]"),
        ("l", "[1, 'a']", [1, "a"]), ("l", "[]", []), ("l", "a, b", "a, b"),
        ("s0", "null", None), ("s0", "None", None), ("s0", "x", "x"), ("opt", "null", None), ("opt", "7", "7"),
        ("e", "2", 2), ("z", "1", "1"), ("u", "7", 7), ("u", "seven", "seven"), ("r", "3", 3), ("any", "3", "3"),
        ("other", "3", "3"),
    ],
)  # fmt: skip
def test_the_schema_tells_what_plain_text_is(form: str, key: str, text: str, value: object) -> None:
    """As vLLM's parsers of Qwen3-Coder and Seed-OSS convert it; what does not fit its type stays text."""
    begin, end = FORMATS[form].begins[0], FORMATS[form].end
    parts = read(CallReader(FORMATS[form], tools=LOOK), [f"{begin}\n{function(**{key: text})}\n{end}"])
    assert calls_in(parts) == [("look", {key: value})] and type(json.loads(parts[0].text)[key]) is type(value)


ONE, TWO = function(city="Oslo", n="3"), function("g")
EXPECTED = [("look", {"city": "Oslo", "n": 3}), ("g", {})]
WRITTEN = [
    ("qwen3_coder", f"I look.\n<tool_call>\n{ONE}\n</tool_call>\n<tool_call>\n{TWO}\n</tool_call>", "I look."),
    ("qwen3_coder", f"<tool_call>{ONE}\n{TWO}</tool_call>", ""),
    ("qwen3_coder", f"\n<tool_call>\n{ONE}\n</tool_call>\n<tool_call>\n{TWO}", ""),  # cut before the end
    (
        "qwen3_coder",
        f"Look\n{ONE}\n</tool_call>\n<tool_call>\n{TWO}\n</tool_call>",
        "Look",
    ),  # models leave the mark out
    ("qwen3_coder", f"<tool_call>{ONE}{TWO}<function=g>\n<parameter=city>\nOs", ""),  # cut within a call
    ("seed_oss", f"<seed:tool_call>\n{ONE}\n</seed:tool_call>\n<seed:tool_call>{TWO}</seed:tool_call>", ""),
    ("glm4", 'look\n{"city": "Oslo", "n": 3}\n<|assistant|>g\n{}', ""),
    ("glm4", '\nlook \n{"city": "Oslo", "n": 3}\ng\n{}<|observation|>', ""),
    ("glm4", 'look\n{"city": "Oslo", "n": 3}\ng\n{}\nlook\n{"city', ""),
]
NO_CALLS = [
    ("qwen3_coder", "<tool_call>\n<function=look>\n<parameter=city>\nOslo"),
    ("qwen3_coder", "<tool_call>\n<function=look>\n<parameter=city>\nOslo\n</function>\n</tool_call>"),
    ("qwen3_coder", f"<tool_call>{ONE} and so on</tool_call>"),
    ("qwen3_coder", f"<tool_call>{ONE}<function=g>oops</function></tool_call>"),
    ("qwen3_coder", '<tool_call>{"name": "look"}</tool_call> or <func'),
    ("seed_oss", "<seed:tool_call><function=></function></seed:tool_call>"),
    ("seed_oss", f"<tool_call>{ONE}</tool_call>"),
    ("glm4", "look"),
    ("glm4", "look\n"),
    ("glm4", "look\nup {1}"),
    ("glm4", 'look\n{"city": '),
    ("glm4", 'look\n{"city": 1} and so on'),
    ("glm4", 'other\n{"city": 1}'),
    ("glm4", 'I say:\nlook\n{"city": 1}'),
    ("glm4", "{}"),
]


@pytest.mark.parametrize(("form", "text", "content"), WRITTEN)
def test_calls_are_the_same_wherever_a_text_is_cut_into_pieces(form: str, text: str, content: str) -> None:
    def reader() -> Reader:
        return CallReader(FORMATS[form], tools=LOOK)

    whole = read(reader(), [text])
    assert calls_in(whole) == EXPECTED and contents(whole) == content
    assert calls_in(read(CallReader(FORMATS[form]), [text]))[1:] == EXPECTED[1:], "tools need not be known"
    for place in range(1, len(text)):
        assert without_ids(read(reader(), [text[:place], text[place:]])) == without_ids(whole), place
    assert without_ids(read(reader(), [*text])) == without_ids(whole)


@pytest.mark.parametrize(("form", "text"), NO_CALLS)
def test_what_is_malformed_or_cut_stays_text(form: str, text: str) -> None:
    for pieces in ([text], [*text], *([text[:place], text[place:]] for place in range(1, len(text)))):
        assert read(CallReader(FORMATS[form], tools=LOOK), pieces) == [Part("content", text)]


@pytest.mark.parametrize("form", [*FORMATS, None])
def test_ids_pass_the_templates_of_their_models(form: str | None) -> None:
    """Mistral's refuse what is not nine letters and digits, as vLLM's parser makes; others have OpenAI's."""
    formats, call = Formats(form and FORMATS[form]), '{"name": "f", "arguments": {}}'
    written = {"hermes": f"<tool_call>{call}</tool_call>", "glm4": "f\n{}", "mistral": f"[TOOL_CALLS][{call}]"}
    xml = f"{FORMATS[form].begins[0]}<function=f></function>" if form in ("qwen3_coder", "seed_oss") else f"[{call}]"
    for choice, text in (({}, written.get(form, xml)), ({"named": "f"}, "{}"), ({"is_required": True}, call)):
        if form is None and not choice:
            continue
        how = {"has_tools": True, "named": None, "is_required": False, "is_parallel": True, **choice}
        text = text if form != "llama3_json" or choice else call
        ids = [read(formats.reader("", **how), [text])[0].call_id for _ in range(20)]
        assert len(set(ids)) == 20
        assert all(re.fullmatch("[a-zA-Z0-9]{9}" if form == "mistral" else "call_[0-9a-f]{24}", found) for found in ids)
