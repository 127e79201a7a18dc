"""The request bodies of OpenAI's API and vLLM's additions: their fields, and the checks across fields."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from swiftllm.core.request import MAX_LOGPROBS, SamplingParams, ServiceClass
from swiftllm.model.tokenizer import Tokenizer
from swiftllm.sampling.grammar import Kind, lenient
from swiftllm.server.output_text import NoOutput, OutputText
from swiftllm.server.parsing import (
    ApiError,
    Flag,
    Lenient,
    TokenIds,
    Whole,
    is_list_of,
    null_is_left_out,
    wholes,
    with_token_ids,
)
from swiftllm.server.tool_calls import object_of
from swiftllm.server.tools import (
    AllowedTools,
    NamedTool,
    Tool,
    ToolChoice,
    check_tools,
    compact,
    forced_schema,
    schemas_of,
)

# -- the form of the output --------------------------------------------------------------------------------------------
# The fields of a request that say which form its output must have.

Source = tuple[Kind, Any]
ANY_OBJECT: Source = ("json_schema", {"type": "object"})


class JsonSchema(Lenient):
    """OpenAI's: a name, and a schema. Outputs follow it; one that is not ``strict`` may say what no grammar can."""

    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Lenient):
    """OpenAI's form of the answer. A schema may lie beside the type, as in its API for responses, and other servers
    take one for ``json_object``, too."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None
    schema_beside: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None
    """Of the schema beside the type."""

    def source(self, name: str) -> Source | None:
        """The grammar; None if there is none. ``name`` is the field's."""
        nested, strict = self.schema_beside, self.strict
        if self.json_schema is not None:
            if nested is not None:
                raise ApiError(400, f"{name}: give one of schema and json_schema", name, "invalid_value")
            nested, strict = self.json_schema.json_schema, self.json_schema.strict
        if self.type == "text":
            if nested is not None:
                raise ApiError(400, f"{name}: a schema needs the type 'json_schema'", name, "invalid_value")
            return None
        if nested is None and self.type == "json_schema":
            raise ApiError(400, f"{name}.schema: Field required", name, "missing")
        if nested is None or (not nested and self.type == "json_object"):
            return ANY_OBJECT
        return "json_schema", nested if strict else lenient(nested)


class StructuredOutputs(Lenient):
    """vLLM's: one of these."""

    json_source: str | dict[str, Any] | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1)
    grammar: str | None = None

    def source(self, name: str) -> Source | None:
        """The grammar; None if there is none. ``name`` is the field's."""
        known: dict[Kind, Any] = {
            "json_schema": self.json_source, "regex": self.regex, "choice": self.choice, "grammar": self.grammar
        }  # fmt: skip
        found: list[Source] = [(kind, source) for kind, source in known.items() if source is not None]
        found += [ANY_OBJECT] * bool(self.json_object)
        others = [option for option, value in (self.model_extra or {}).items() if value]
        if others:
            message = f"{name}.{others[0]} is not implemented: leave it out"
            raise ApiError(400, message, name, "unsupported_parameter")
        if len(found) > 1:
            raise ApiError(400, f"{name}: give one of json, regex, choice and grammar", name, "invalid_value")
        return found[0] if found else None


# -- fields that are not read ------------------------------------------------------------------------------------------
# Fields of a generation request that the server does not read: some are refused, the others ignored.
#
# Clients send many fields, so unknown ones are ignored, with a line in the log. Known ones that would change the output
# and are not implemented are refused, unless they have a value without effect.

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
    """Check that a field that is not implemented has a value without effect."""
    if value is not None and value not in harmless:
        raise ApiError(400, f"{name} is not implemented: leave it out", name, "unsupported_parameter")


def log_ignored_field(name: str) -> None:
    name = name[:MAX_LOGGED_CHARS]
    if name not in _ignored and len(_ignored) < MAX_IGNORED_LOGGED:
        _ignored.add(name)
        logger.warning("a request has the parameter %r, which is unknown and ignored (logged once)", name)


# -- bodies ------------------------------------------------------------------------------------------------------------

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16  # OpenAI allows four, vLLM any number; evaluation harnesses send six
MAX_STOP_TOKENS = 256  # each output has a set of them
MAX_STOP_CHARS = 1000
MAX_SALT_CHARS = 1000
MAX_BAD_WORDS = 200
REQUEST_ID = "^[!-~]{1,200}$"  # it is in log lines
DEFAULT_COMPLETION_TOKENS = 16
TEXT_PARTS = ("text", "input_text", "output_text")
SAMPLING_DEFAULTS: dict[str, Any] = {"temperature": 1.0}
SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "seed", "stop_token_ids", "ignore_eos", "min_tokens", "allowed_token_ids",
)  # fmt: skip


PROMPT_FORMS = [{"type": "string"}, {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}]
PROMPT_FORMS += [{"type": "array", "items": form, "minItems": 1} for form in PROMPT_FORMS]

ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"]
URGENT_TIERS = ("priority", "fast", "ultrafast")  # OpenAI's answer to all of them is "priority"
BadWord = Annotated[str, Field(min_length=1, max_length=100, pattern=r"\S")]


class StreamOptions(Lenient):
    include_usage: Flag = False
    """Add a last chunk with the token counts of the whole request."""
    continuous_usage_stats: Flag = False
    """With ``include_usage``: put the token counts so far into every chunk (vLLM)."""


class GenerationRequest(Lenient):
    """The fields that completions and chat share; null is the same as a field left out."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], BeforeValidator(with_token_ids)] | None = None
    seed: Whole | None = None
    n: Annotated[Whole, BeforeValidator(null_is_left_out), Field(ge=1, le=MAX_CHOICES)] = 1
    best_of: Whole | None = None
    max_tokens: Whole | None = None
    min_tokens: Whole | None = None
    bad_words: list[BadWord] | None = None
    """Words that the output never has, with a space before them or without (vLLM)."""
    allowed_token_ids: TokenIds | None = None
    """The only tokens that the output may have (vLLM)."""
    truncate_prompt_tokens: Annotated[Whole, Field(ge=-1)] | None = None
    """Keep only so many tokens of the prompt, the last; -1: as many as fit (vLLM)."""
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOP_TOKENS)] | None = None
    include_stop_str_in_output: Flag = False
    ignore_eos: Flag = False
    skip_special_tokens: Flag = True
    return_token_ids: Flag = False
    """Show the token ids of prompt and output (vLLM)."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    request_id: Annotated[str, Field(pattern=REQUEST_ID)] | None = None
    """Part of the answer's id (vLLM); no two requests may have the same at once."""
    prompt_logprobs: Whole | None = None
    """Number of likely tokens to report at each position of the prompt, in vLLM's form."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Seconds until the request's deadline; not in OpenAI's API."""
    priority: Whole | None = None
    """vLLM's; lower is earlier. A request above 0 is best-effort, all others are latency-sensitive."""
    service_tier: ServiceTier | None = None
    """OpenAI's. A request with "flex" is best-effort."""
    user: str | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    """vLLM's. Only requests with the same salt share cached prefixes, and can tell by their times what is cached."""

    @property
    def service_class(self) -> ServiceClass:
        is_best_effort = self.service_tier == "flex" or (self.priority or 0) > 0
        return ServiceClass.BEST_EFFORT if is_best_effort else ServiceClass.LATENCY_SENSITIVE

    @property
    def tier_served(self) -> str | None:
        """The tier that the answer names, if the client set one: OpenAI's name of what the request gets."""
        if self.service_tier is None:
            return None
        if self.service_class is ServiceClass.BEST_EFFORT:
            return "flex"
        return "priority" if self.service_tier in URGENT_TIERS else "default"

    @property
    def usage_wanted(self) -> StreamOptions:
        return self.stream_options or StreamOptions()

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def num_logprobs(self) -> int | None:
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def grammar(self) -> tuple[str, Kind, Any] | None:
        """What the output must follow, if anything: the field that says so, the kind, and the source."""
        fields = {"response_format": self.response_format, "structured_outputs": self.structured_outputs}
        found = [(name, *source) for name, given in fields.items() if given and (source := given.source(name))]
        if len(found) > 1:
            raise ApiError(400, f"give one of {' and '.join(fields)}", "structured_outputs", "invalid_value")
        return found[0] if found else None

    def check_fields(self) -> None:
        """Check what the types of the fields cannot express."""
        check_unsupported_fields(self.model_extra or {})
        if self.best_of not in (None, self.n):
            message = f"best_of={self.best_of} is not implemented unless it equals n: leave it out"
            raise ApiError(400, message, "best_of", "unsupported_parameter")
        if len(self.bad_words or ()) > MAX_BAD_WORDS:
            raise ApiError(400, f"bad_words must be at most {MAX_BAD_WORDS}", "bad_words", "invalid_value")
        priority = self.priority or 0
        if (self.service_tier == "flex" and priority < 0) or (self.service_tier in URGENT_TIERS and priority > 0):
            message = f"service_tier={self.service_tier!r} contradicts priority={priority}: leave one of them out"
            raise ApiError(400, message, "service_tier", "invalid_value")
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options need stream=true", "stream_options", "invalid_value")
        if self.prompt_logprobs is not None and self.stream:
            raise ApiError(400, "prompt_logprobs need stream=false", "prompt_logprobs", "invalid_value")
        stops = self.stop_strings
        if len(stops) > MAX_STOP_STRINGS or not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
            rule = f"at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARS} characters"
            raise ApiError(400, f"stop must be {rule}", "stop", "invalid_value")

    def bad_token_ids(self, tokenizer: Tokenizer) -> set[tuple[int, ...]]:
        """The ``bad_words`` in tokens, as they begin a text and as they follow a space."""
        spellings = [text for word in self.bad_words or () for text in (word.lstrip(), f" {word.lstrip()}")]
        return {tuple(tokenizer.encode(text, add_special_tokens=False)) for text in spellings}

    def sampling(self, max_tokens: int, others: Mapping[str, Any] = MappingProxyType({})) -> SamplingParams:
        """The engine's sampling parameters for this request. ``others`` are those that it does not give."""
        given: dict[str, Any] = {name: value for name in SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        if given.get("top_k") == -1:  # vLLM's value for all tokens
            del given["top_k"]
        lengths: dict[str, Any] = {
            "max_tokens": max_tokens,
            "logprobs": self.num_logprobs,
            "prompt_logprobs": self.num_prompt_logprobs,
        }
        try:
            return SamplingParams(**SAMPLING_DEFAULTS | dict(others) | given | lengths)
        except ValueError as error:
            about, _, rule = str(error).partition("=")
            param = self.param(about)
            raise ApiError(400, f"{param}={rule}", param, "invalid_value") from None

    def param(self, about: str) -> str:
        """The field of this body that sets ``about``: "prompt", or a field of :class:`SamplingParams`."""
        return about

    def output_text(self, tokenizer: Tokenizer | None) -> OutputText:
        """A new, empty text for one output."""
        return OutputText(
            tokenizer,
            stops=self.stop_strings,
            include_stops=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            stop_token_ids=self.stop_token_ids or (),
            min_tokens=self.min_tokens or 0,
        )

    def kept_tokens(self, prompt: list[int], max_tokens: int | None, longest: int) -> list[int]:
        """The tokens of a prompt that ``truncate_prompt_tokens`` keeps, in requests of at most ``longest`` tokens."""
        most = self.truncate_prompt_tokens
        if most == -1:
            most = max(1, longest - (max_tokens or 1))
        return prompt if most is None else prompt[max(0, len(prompt) - most) :]


class CompletionRequest(GenerationRequest):
    prompt: Annotated[Any, BeforeValidator(wholes), WithJsonSchema({"anyOf": PROMPT_FORMS})]
    echo: Flag = False
    logprobs: Whole | None = None
    add_special_tokens: Flag = True

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, from any of the four forms of ``prompt``."""
        prompt = self.prompt
        if isinstance(prompt, str) or is_list_of(int, prompt):
            return [prompt]
        if isinstance(prompt, list) and prompt and all(isinstance(p, str) or is_list_of(int, p) for p in prompt):
            return prompt
        forms = "a text, a list of texts, a list of token ids, or a list of such lists"
        raise ApiError(400, f"prompt must be {forms}, and not empty", "prompt", "invalid_value")

    @property
    def num_prompts(self) -> int:
        """How many :attr:`prompts` there would be, without a look at each."""
        prompt = self.prompt
        return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1

    @property
    def is_prompt_only(self) -> bool:
        """Whether the client wants its prompt back and no new tokens."""
        return self.echo and self.max_tokens == 0

    @property
    def tokens_to_make(self) -> int:
        """Number of tokens to generate: one if only the prompt is wanted, as the engine then computes the prompt."""
        if self.is_prompt_only:
            return 1
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    def sampling(self, max_tokens: int, others: Mapping[str, Any] = MappingProxyType({})) -> SamplingParams:
        sampling = super().sampling(max_tokens, others)
        return sampling.varied(ignore_eos=self.ignore_eos or self.is_prompt_only)

    def output_text(self, tokenizer: Tokenizer | None) -> OutputText:
        return NoOutput(tokenizer) if self.is_prompt_only else super().output_text(tokenizer)


class TextPart(Lenient):
    """A part of a message: of OpenAI's APIs for chat and responses, or a refusal of the model."""

    type: str
    text: str | None = None
    refusal: str | None = None

    @property
    def content(self) -> str | None:
        """Its text, which null leaves empty; None if it has none."""
        field = "refusal" if self.type == "refusal" else "text" if self.type in TEXT_PARTS else None
        return (getattr(self, field) or "") if field in self.model_fields_set else None


class ChatMessage(Lenient):
    role: str
    content: str | list[str | TextPart] | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it, with the content in one string."""
        content = self.content
        if isinstance(content, list):
            texts = list[str]()
            for part in content:
                if isinstance(part, str):
                    texts.append(part)
                elif part.content is not None:
                    texts.append(part.content)
                else:
                    kind = part.type[:MAX_STOP_CHARS]
                    message = f"content of type {kind!r} is not implemented: this model reads text only"
                    raise ApiError(400, message, "messages", "unsupported_parameter")
            content = "".join(texts)
        given = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        message = {**given, "role": self.role, "content": content or ""}
        if not (calls := given.get("tool_calls")):  # templates take the field for a call
            message.pop("tool_calls", None)
        elif isinstance(calls, list):
            message["tool_calls"] = [with_object(call) for call in calls]
            if not content and "reasoning_content" in message:
                message.setdefault("thinking", message["reasoning_content"])  # its name in gpt-oss' template
        return message


def with_object(call: Any) -> Any:
    """A call of a tool as templates expect it, with its arguments as an object where they are one in JSON, or none."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(given := function.get("arguments") or "{}", str):
        return call
    arguments = object_of(given)
    return call if arguments is None else {**call, "function": {**function, "arguments": arguments}}


class TemplateOptions(Lenient):
    """How a conversation becomes a prompt."""

    add_generation_prompt: Flag = True
    continue_final_message: Flag = False
    """Continue the last message instead of answering it (vLLM)."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the model's chat template (vLLM)."""
    reasoning_effort: str | None = None
    """Such a variable, too: OpenAI's name for how long a model thinks."""
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None

    @property
    def tools_offered(self) -> list[Tool]:
        """The tools that the model may call."""
        if self.tool_choice == "none":
            return []
        allowed = self.tool_choice.names if isinstance(self.tool_choice, AllowedTools) else None
        return [tool for tool in self.tools or () if allowed is None or tool.function.name in allowed]

    @property
    def is_call_required(self) -> bool:
        """Whether a tool must be called, whichever."""
        choice = self.tool_choice
        return (choice.mode if isinstance(choice, AllowedTools) else choice) == "required"

    @property
    def must_call(self) -> bool:
        return self.is_call_required or self.named_tool is not None

    @property
    def named_tool(self) -> str | None:
        """The tool that must be called, if one is named."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None


class ChatRequest(GenerationRequest, TemplateOptions):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Whole | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: Flag = True
    """Show the model's reasoning (vLLM)."""

    @property
    def grammar(self) -> tuple[str, Kind, Any] | None:
        found = super().grammar
        if not self.must_call:
            return found
        if found is not None and found[0] != "response_format":  # that is of content, which a call does not have
            raise ApiError(400, f"give {found[0]}, or a tool_choice that forces a call", "tool_choice", "invalid_value")
        schemas = schemas_of(self.tools_offered)
        named = compact(schemas[self.named_tool]) if self.named_tool else None
        return "tools", "json_schema", named or forced_schema(schemas, self.is_parallel)

    @property
    def is_parallel(self) -> bool:
        """Whether an answer may have several calls."""
        return self.parallel_tool_calls is not False

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def param(self, about: str) -> str:
        names = {"prompt": "messages"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return names.get(about, about)

    def check_fields(self) -> None:
        super().check_fields()
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs need logprobs=true", "top_logprobs", "invalid_value")
        check_tools(self.tools or [], self.tool_choice)


class TokenizeRequest(TemplateOptions):
    """A text or a conversation to tokenize."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: Flag = True
    return_token_strs: bool | None = None


class DetokenizeRequest(Lenient):
    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**32)]], BeforeValidator(wholes)]
