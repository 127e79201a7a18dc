"""The served model as every endpoint needs it: service, names, limits and tokenizer."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from swiftllm import __version__
from swiftllm.model.folder import model_name
from swiftllm.model.tokenizer import Tokenizer
from swiftllm.sampling.trial import GrammarTrials, TriedGrammar
from swiftllm.scheduling.validation import RequestLimits, context_limit
from swiftllm.server.client import EngineClient
from swiftllm.server.parsing import ApiError
from swiftllm.server.protocol import ChatMessage, GenerationRequest, TemplateOptions
from swiftllm.server.settings import ServerSettings
from swiftllm.server.tool_calls import FORMATS, Tools
from swiftllm.server.tools import AnswerGrammar

LONG_TEXT_CHARS = 2000  # takes about 1 ms to tokenize; longer texts would delay the event loop too much
CHARS_OF_A_CALL = 50  # take as long as what each text costs besides
LONGEST_TEXT = 4  # longest requests in a text to tokenize that need not fit into one
MAX_NAME_CHARS = 100  # of a client's text, in an error message
KNOWN = f"one of {', '.join(FORMATS)}"

Result = TypeVar("Result")


class ServingContext:
    """The service, its settings, and the model's names, limits and tokenizer.

    ``tokenizer`` is None if the model folder has none: prompts are token ids and answers have no text.
    """

    def __init__(self, service: EngineClient, settings: ServerSettings) -> None:
        ready = service.ready
        self.service = service
        self.settings = settings
        self.model_path = str(ready.description.get("model", "model"))
        self.model_names = tuple(dict.fromkeys(settings.served_model_name)) or (model_name(self.model_path),)
        self.fingerprint = fingerprint_of(ready.description)
        self.caches_prefixes = ready.caches_prefixes
        self.created = int(time.time())
        self.tokenizer = service.tokenizer
        self.sampling_defaults = settings.sampling_defaults(self.model_path)
        self._chat_template = settings.read_chat_template()
        self.formats = settings.formats(self.tokenizer)
        if self.tokenizer is not None:
            self._trials = GrammarTrials(self.tokenizer, ready.request_limits.vocab_size, ready.eos_token_ids)
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="tokenizer")
        self._trying = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    @property
    def model_name(self) -> str:
        """The first of the model's names."""
        return self.model_names[0]

    @property
    def request_limits(self) -> RequestLimits:
        """The engine's limits for requests."""
        return self.service.ready.request_limits

    def check_model(self, name: str | None) -> None:
        """Check the model that a client names; None and "" are the served model, as in vLLM, and so is what the command
        line called it."""
        if name and name not in self.model_names and not is_of_folder(name, self.model_path):
            served = " or ".join(map(repr, self.model_names))
            message = f"the model {name[:MAX_NAME_CHARS]!r} does not exist; this server serves {served}"
            raise ApiError(404, message, "model", "model_not_found")

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer, for requests that need one."""
        if self.tokenizer is None:
            message = "the model folder has no tokenizer: send prompts as lists of token ids to /v1/completions"
            raise ApiError(400, message, "prompt", "no_tokenizer")
        return self.tokenizer

    async def grammar_of(self, body: GenerationRequest, calls: Tools | None = None) -> TriedGrammar | None:
        """The grammar that the output of a request must follow, if there is one. If there is none, its ``calls`` must
        follow their tools' schemas, where the form of calls is known."""
        wanted = body.grammar
        name, kind, source = wanted or ("tools", "grammar", None)
        try:
            if wanted is None and calls is not None and self.formats.calls is not None:
                source = await self.run_in_thread(lambda: self._answers.following(calls))
            if source is None:
                return None
            self.require_tokenizer()
            return await asyncio.get_running_loop().run_in_executor(self._trying, self._trials.check, kind, source)
        except ValueError as error:
            raise ApiError(400, f"{name}: {error}", name, "invalid_grammar") from None

    @cached_property
    def _answers(self) -> AnswerGrammar:
        assert self.formats.calls is not None
        return AnswerGrammar(self.formats.calls, self.require_tokenizer())

    async def run_in_thread(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Result of a function that would delay the event loop, called in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    async def encode(
        self, texts: Sequence[str], param: str, add_special_tokens: bool, longest: int | None = None
    ) -> list[list[int]]:
        """Tokens of texts, which the field ``param`` has brought; if there is much to do, it is done in a thread."""
        if not texts:
            return []
        tokenizer = self.require_tokenizer()
        num_chars = max(map(len, texts))
        fewest = tokenizer.fewest_tokens(num_chars)
        if fewest >= (longest or LONGEST_TEXT * self.request_limits.longest_request):
            limit = context_limit(longest or self.request_limits.longest_request, is_prompt_too_long=True)
            message = f"{limit}; {num_chars} characters are at least {fewest} tokens"
            raise ApiError(400, message, param, "context_length_exceeded")
        return await self._run_by_size(texts, lambda: [tokenizer.encode(text, add_special_tokens) for text in texts])

    async def _run_by_size(self, texts: Sequence[str], function: Callable[[], Result]) -> Result:
        """Result of a function that goes through these texts."""
        if sum(map(len, texts)) + CHARS_OF_A_CALL * (len(texts) - 1) <= LONG_TEXT_CHARS:
            return function()
        return await self.run_in_thread(function)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, including special tokens."""
        tokenizer = self.require_tokenizer()
        strings = await self.run_in_thread(tokenizer.token_strings, token_ids)
        if None in strings:
            unknown = token_ids[strings.index(None)]
            raise ApiError(400, f"tokens: the vocabulary has no token {unknown}", "tokens", "invalid_value")
        return await self.run_in_thread(tokenizer.decode, token_ids, False)

    async def encode_prompts(
        self, texts: Sequence[str], body: GenerationRequest, param: str, add_special_tokens: bool
    ) -> list[list[int]]:
        """Tokens of prompts, which the field ``param`` of ``body`` has brought."""
        longest = self.request_limits.longest_of(body.service_class) if body.truncate_prompt_tokens is None else None
        return await self.encode(texts, param, add_special_tokens, longest)

    def check_num_outputs(self, body: GenerationRequest) -> None:
        """Check that the service takes as many outputs at once, before any work is done for them."""
        n, num_prompts, limit = body.n, body.num_prompts, self.service.limits.most_open(body.service_class)
        if n * num_prompts > limit:
            message = f"{num_prompts} prompts with n={n} exceed the {limit} requests that this server takes at once"
            raise ApiError(400, message, "n" if n > 1 else body.param("prompt"), "too_many_choices")
        self.service.check_places([body.service_class] * (n * num_prompts))

    async def render_chat(self, conversation: Sequence[ChatMessage], how: TemplateOptions) -> str:
        """The text of a conversation by the model's chat template, with its special tokens."""
        if how.continue_final_message and how.add_generation_prompt:
            message = "continue_final_message needs add_generation_prompt=false"
            raise ApiError(400, message, "continue_final_message", "invalid_value")
        messages: list[dict[str, Any]] = [message.for_template() for message in conversation]
        if self.formats.calls is not None:
            messages = self.formats.calls.history(messages)
        tools = [tool.for_template() for tool in how.tools_offered]
        if tools and self.formats.calls_name is None and not how.must_call:  # what is forced has a form of its own
            message = f"this model has no known form of tool calls: start the server with --tool-call-parser, {KNOWN}"
            raise ApiError(400, message, "tools", "unsupported_parameter")
        effort = {} if how.reasoning_effort is None else {"reasoning_effort": how.reasoning_effort}
        variables = {**effort, **(how.chat_template_kwargs or {})}
        options = (messages, how.add_generation_prompt, how.continue_final_message, variables)
        render = partial(self.require_tokenizer().render_chat, *options, self._chat_template, tools)
        try:
            return await self._run_by_size([message["content"] for message in messages], render)
        except ValueError as error:
            raise ApiError(400, str(error), "messages", "chat_template") from None


def is_of_folder(name: str, folder: str) -> bool:
    """Whether a name is the path of a model's folder, or the name on the hub of the model there."""
    hub_name = model_name(folder)
    return Path(name) == Path(folder) or ("/" in hub_name and name == hub_name)


def fingerprint_of(description: Mapping[str, Any]) -> str:
    """OpenAI's `system_fingerprint`: equal seeds may give other outputs where it is another one."""
    what = {name: description.get(name) for name in ("system", "model", "device", "dtype", "cpu_kv_dtype")}
    return f"fp_{hashlib.sha256(json.dumps([__version__, what], sort_keys=True).encode()).hexdigest()[:12]}"
