"""Whatever a client sends, it is told what was wrong in OpenAI's words, and the server goes on."""

import json
import logging
from types import SimpleNamespace

import openai
import pytest
from pydantic import ValidationError

from swiftllm import RequestRefused, SamplingParams
from swiftllm.llm import LLM
from swiftllm.model.tokenizer import Tokenizer
from swiftllm.server import protocol
from swiftllm.server.app import model_card
from swiftllm.server.client import QueueFull, ServiceStopping
from swiftllm.server.context import ServingContext
from swiftllm.server.engine_process import EngineService
from swiftllm.server.messages import RequestFailed, ServiceLimits
from swiftllm.server.parsing import ApiError, as_api_error, parse_body
from swiftllm.server.settings import ServerSettings
from tests.reference.fake_engine import fake_engine
from tests.reference.tiny_model import make_tiny_llama
from tests.reference.tiny_tokenizer import make_tiny_tokenizer
from tests.swiftllm.server.http_server import running

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def error_of(answer, status=400):
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


BAD_BODIES = [
    ({"prompt": "a", "max_tokens": "5"}, "max_tokens", "valid integer"),
    ({"prompt": "a", "max_tokens": 5.5}, "max_tokens", "valid integer"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens", "at least 1"),
    ({"prompt": "a", "temperature": "hot"}, "temperature", "valid number"),
    ({"prompt": "a", "temperature": -1}, "temperature", "at least 0"),
    ({"prompt": "a", "top_p": 0}, "top_p", "(0, 1]"),
    ({"prompt": "a", "top_k": -2}, "top_k", "at least 0"),
    ({"prompt": "a", "top_k": 2**64}, "top_k", "64-bit"),
    ({"prompt": "a", "logprobs": 21}, "logprobs", "0..20"),
    ({"prompt": "a", "seed": 2**63}, "seed", "64-bit"),
    ({"prompt": "a", "n": 0}, "n", "greater than or equal to 1"),
    ({"prompt": "a", "n": True}, "n", "valid integer"),
    ({"prompt": "a", "n": 2, "best_of": 3}, "best_of", "not implemented"),
    ({"prompt": "a", "stop": 7}, "stop", "valid"),
    ({"prompt": "a", "stop": list("abcdefghijklmnopq")}, "stop", "at most 16"),
    ({"prompt": "a", "stop": ""}, "stop", "1 to 1000 characters"),
    ({"prompt": "a", "stop_token_ids": ["a"]}, "stop_token_ids", "valid integer"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
    ({"prompt": "a", "timeout": 0}, "timeout", "greater than 0"),
    ({"prompt": "a", "max_tokens": 0, "logprobs": 1}, "max_tokens", "at least 1"),
    ({"prompt": "a", "max_tokens": -1, "echo": True}, "max_tokens", "at least 1"),
    ({"prompt": "a", "echo": True, "logprobs": 21}, "logprobs", "0..20"),
    ({"prompt": [5] * 512, "max_tokens": 0, "echo": True}, "prompt", "512 prompt + 1 output tokens = 513 exceed"),
    ({"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs", "0..20"),
    ({"prompt": "a", "prompt_logprobs": True}, "prompt_logprobs", "valid integer"),
    ({"prompt": "a", "prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "stream=false"),
    ({"prompt": [5] * 512, "max_tokens": 1, "prompt_logprobs": 0}, "prompt", "513 exceed"),
    ({"prompt": "a", "min_tokens": 17}, "min_tokens", "in 0..max_tokens=16"),
    ({"prompt": "a", "min_tokens": -1}, "min_tokens", "in 0..max_tokens=16"),
    ({"prompt": "a", "bad_words": "a"}, "bad_words", "valid array"),
    ({"prompt": "a", "bad_words": [" "]}, "bad_words", "pattern"),
    ({"prompt": "a", "bad_words": ["a"] * 201}, "bad_words", "at most 200"),
    ({"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids", "one token id at least"),
    ({"prompt": "a", "allowed_token_ids": [5, 128]}, "allowed_token_ids", "token id 128 is outside the vocabulary"),
    ({"prompt": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "greater than or equal to -1"),
    ({"prompt": "a", "truncate_prompt_tokens": 0}, "prompt", "empty"),
    ({"prompt": "a", "request_id": "a b"}, "request_id", "pattern"),
    ({"prompt": "a", "priority": 1.5}, "priority", "valid integer"),
    ({"prompt": "a", "service_tier": "gold"}, "service_tier", "'scale', 'priority'"),
    ({"prompt": "a", "service_tier": "flex", "priority": -1}, "service_tier", "contradicts priority=-1"),
    ({"prompt": "a", "service_tier": "priority", "priority": 2}, "service_tier", "contradicts priority=2"),
    ({"prompt": "a", "presence_penalty": 2.5}, "presence_penalty", "[-2, 2]"),
    ({"prompt": "a", "frequency_penalty": -3}, "frequency_penalty", "[-2, 2]"),
    ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty", "above 0"),
    ({"prompt": "a", "min_p": 1.5}, "min_p", "[0, 1]"),
    ({"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias", "[-100, 100]"),
    ({"prompt": "a", "logit_bias": {"five": 1}}, "logit_bias", "valid integer"),
    ({"prompt": "a", "logit_bias": {"128": 1}}, "logit_bias", "token id 128 is outside the vocabulary of 128"),
    ({"prompt": "a", "stop_token_ids": [5, 128]}, "stop_token_ids", "token id 128 is outside the vocabulary of 128"),
    ({"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids", "token id -1 is outside the vocabulary of 128"),
    ({"prompt": "a", "suffix": "b"}, "suffix", "not implemented"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "not empty"),
    ({"prompt": [[]]}, "prompt", "not empty"),
    ({"prompt": ["a", [1]], "n": 1, "max_tokens": 10**9}, "max_tokens", "max_model_len=512"),
    ({"prompt": [1, "a"]}, "prompt", "list of token ids"),
    ({"prompt": [True]}, "prompt", "list of token ids"),
    ({"prompt": [1.5]}, "prompt", "list of token ids"),
    ({"prompt": {"a": 1}}, "prompt", "list of token ids"),
    ({"prompt": [128]}, "prompt", "vocabulary of 128"),
    ({"prompt": [-1]}, "prompt", "vocabulary of 128"),
    ({"prompt": [5] * 512}, "prompt", "512 prompt + 1 output tokens = 513 exceed max_model_len=512"),
    ({"prompt": [5] * 500, "max_tokens": 513}, "max_tokens", "500 prompt + 513 output tokens = 1013 exceed"),
    ({"prompt": ["a"] * 33, "n": 2}, "n", "64 requests that this server takes at once"),
    ({"prompt": ["a"] * 65}, "prompt", "64 requests that this server takes at once"),
    ({}, "prompt", "required"),
]


@pytest.mark.parametrize(("body", "param", "message"), BAD_BODIES)
def test_bad_completion_requests(server, body, param, message):
    error = error_of(server.post(COMPLETIONS, body))
    assert message in error["message"] and error["param"] == param and error["type"] == "invalid_request_error"


BAD_CHATS = [
    ({"messages": []}, "messages", "at least 1 item"),
    ({"messages": "Hello"}, "messages", "valid"),
    ({"messages": [{"content": "Hello"}]}, "messages", "required"),
    ({"messages": [{"role": "robot", "content": "Hello"}]}, "messages", "no such role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "messages", "'image_url'"),
    ({"messages": HELLO, "tools": [{"type": "function"}]}, "tools", "Field required"),
    ({"messages": HELLO, "top_logprobs": 2}, "top_logprobs", "logprobs=true"),
    ({"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    ({"messages": HELLO, "logprobs": 5}, "logprobs", "valid boolean"),
    ({"messages": HELLO, "prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "stream=false"),
    ({"messages": HELLO, "max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens=0 must be"),
    ({"messages": HELLO, "max_completion_tokens": 513}, "max_completion_tokens", "exceed max_model_len=512"),
    ({"messages": HELLO, "max_tokens": 513}, "max_tokens", "exceed max_model_len=512"),
    ({"messages": [{"role": "user", "content": "a" * 600}]}, "messages", "exceed max_model_len=512"),
    ({"messages": HELLO, "chat_template_kwargs": {"tokenize": True}}, "messages", "cannot be called tokenize"),
    ({"messages": HELLO, "continue_final_message": True}, "continue_final_message", "add_generation_prompt=false"),
]


@pytest.mark.parametrize(("body", "param", "message"), BAD_CHATS)
def test_bad_chat_requests(server, body, param, message):
    error = error_of(server.post(CHAT, body))
    assert message in error["message"] and error["param"] == param


@pytest.mark.parametrize(
    ("tokens", "message"), [([5, 200, 6], "no token 200"), ([2**32 - 1], "no token 4294967295"), ([2**32], "less than")]
)
def test_tokens_that_have_no_text(server, tokens, message):
    error = error_of(server.post("/detokenize", {"tokens": tokens}))
    assert message in error["message"] and error["param"] == "tokens"


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[1]", b'"a"', b"null", b"\xff\xfe", b'{"prompt": "\\ud800"}', b"[" * 9999]
)
def test_bodies_that_are_no_requests(server, data):
    error_of(server.http.post(COMPLETIONS, content=data, headers={"Content-Type": "application/json"}))


def test_values_that_change_nothing_are_let_in(server):
    harmless = {name: values[0] for name, values in protocol.NOT_IMPLEMENTED.items() if values}
    answer = server.post(COMPLETIONS, {"prompt": "a", **harmless, "user": None, "n": None, "logit_bias": None})
    assert answer.status_code == 200
    answer = server.post(CHAT, {"messages": HELLO, "max_tokens": 1, "top_logprobs": 0, "model": ""})
    assert answer.status_code == 200


@pytest.mark.parametrize("kind", [protocol.CompletionRequest, protocol.ChatRequest, protocol.TokenizeRequest])
def test_null_is_a_field_left_out(kind):
    least = {"prompt": "a"} if kind is not protocol.ChatRequest else {"messages": HELLO}
    nulls = dict.fromkeys(kind.model_fields.keys() - least.keys())
    assert parse_body(kind, json.dumps(least | nulls).encode()) == parse_body(kind, json.dumps(least).encode())


def test_unknown_parameters_are_ignored_and_logged_once(server, caplog, monkeypatch):
    monkeypatch.setattr(protocol, "_ignored", set())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert server.post(COMPLETIONS, {"prompt": "a", "sparkle": 7}).status_code == 200
    assert sum("sparkle" in message for message in caplog.messages) == 1


def test_a_long_name_makes_no_long_line(server, caplog):
    with caplog.at_level(logging.WARNING):
        assert server.post(COMPLETIONS, {"prompt": "a", "z" * 100_000: 1}).status_code == 200
    assert max(map(len, caplog.messages)) < 300


TOO_MANY = [
    (COMPLETIONS, {"prompt": ["a"] * 30_000}, "prompt", "30000 prompts with n=1 exceed the 64 requests"),
    (COMPLETIONS, {"prompt": ["a"] * 33, "n": 2, "logit_bias": {"5": 1}}, "n", "33 prompts with n=2"),
    (CHAT, {"messages": HELLO, "n": 65}, "n", "1 prompts with n=65 exceed"),
    (CHAT, {"messages": HELLO * 10_001}, "messages", "at most 10000 items"),
    (CHAT, {"messages": [{"role": "user", "content": ["a"] * 10_001}]}, "messages", "at most 10000 items"),
    ("/v1/messages", {"messages": HELLO * 10_001, "max_tokens": 1}, "messages", "at most 10000 items"),
    ("/v1/responses", {"input": HELLO * 10_001}, "input", "at most 10000 items"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {str(i): 0 for i in range(2**18 + 1)}}, "logit_bias", "at most 262144"),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": [5] * 257}, "stop_token_ids", "at most 256 items"),
    (COMPLETIONS, {"prompt": "a", "allowed_token_ids": [5] * (2**18 + 1)}, "allowed_token_ids", "at most 262144"),
]


@pytest.mark.parametrize(("path", "body", "param", "message"), TOO_MANY, ids=range(len(TOO_MANY)))
def test_counts_come_before_tokens(server, monkeypatch, path, body, param, message):
    monkeypatch.setattr(Tokenizer, "encode", None)
    monkeypatch.setattr(Tokenizer, "render_chat", None)
    monkeypatch.setattr(protocol.GenerationRequest, "sampling", None)
    error = server.post(path, body).json()["error"]
    assert message in error["message"] and error["param"] == param


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (protocol.CompletionRequest, {"prompt": "a", "stop_token_ids": ["a"] * 1000}),
        (protocol.CompletionRequest, {"prompt": "a", "logit_bias": {str(i): "a" for i in range(1000)}}),
        (protocol.ChatRequest, {"messages": [1] * 1000}),
        (protocol.ChatRequest, {"messages": HELLO, "tools": [1] * 1000}),
    ],
)
def test_of_many_wrong_items_one_is_told(kind, fields):
    with pytest.raises(ValidationError) as caught:
        kind.model_validate_json(json.dumps(fields))
    assert caught.value.error_count() == 1


def test_unknown_paths_methods_and_models(server):
    error = error_of(server.post("/chat/completions", {}), 404)
    assert error["type"] == "not_found_error" and "/v1/chat/completions" in error["message"]
    assert error_of(server.http.get(COMPLETIONS), 405)
    for answer in (server.post(COMPLETIONS, {"prompt": "a", "model": "gpt"}), server.http.get("/v1/models/gpt")):
        error = error_of(answer, 404)
        assert error["code"] == "model_not_found" and error["param"] == "model" and "'tiny-chat'" in error["message"]
    assert len(server.post(COMPLETIONS, {"prompt": "a", "model": "x" * 10_000}).content) < 1000


def test_the_openai_client_raises_its_own_errors(server):
    create = server.client().completions.create
    with pytest.raises(openai.NotFoundError, match="serves 'tiny-chat'"):
        create(model="gpt", prompt="a")
    with pytest.raises(openai.BadRequestError) as caught:
        create(model="tiny-chat", prompt="a", max_tokens=4000)
    assert caught.value.code == "context_length_exceeded" and "max_model_len=512" in caught.value.message
    with pytest.raises(openai.BadRequestError) as caught:
        create(model="tiny-chat", prompt="a", frequency_penalty=3, stream=True)
    assert caught.value.param == "frequency_penalty"


def test_refusals_are_counted(server):
    server.post(COMPLETIONS, {})
    lines = [
        line for line in server.http.get("/metrics").text.splitlines() if 'status="400"' in line or '="400"' in line
    ]
    assert len(lines) == 1 and float(lines[0].rsplit(" ", 1)[1]) >= 1


# -- servers of their own ---------------------------------------------------------------------------------------------


def fake_service(**limits):
    engine = fake_engine("swiftllm", num_gpu_blocks=8, num_cpu_blocks=0)
    return EngineService(engine, ServiceLimits(**limits))


def test_the_api_key_guards_what_costs_something():
    with running(fake_service(), ServerSettings(api_key="sesame", served_model_name="m")) as server:
        wrong = ({"Authorization": "Bearer wrong"}, {"Authorization": "Basic sesame"}, {"x-api-key": "wrong"})
        for headers in ({}, *wrong):
            answer = server.post(COMPLETIONS, {"prompt": [5]}, headers=headers)
            assert error_of(answer, 401)["code"] == "invalid_api_key"
        for path in ("/v1/models", "/v1/models/m"):
            error_of(server.http.get(path), 401)
        for path in (CHAT, "/tokenize", "/detokenize", "/v1/responses", "/v1/messages"):
            error_of(server.post(path, {}), 401)
        for path in ("/health", "/ping", "/version", "/metrics", "/"):
            assert server.http.get(path).status_code == 200
        with pytest.raises(openai.AuthenticationError):
            server.client().models.list()
        anthropic = server.post(COMPLETIONS, {"prompt": [5], "max_tokens": 1}, headers={"x-api-key": "sesame"})
        assert anthropic.status_code == 200
        assert server.client(api_key="sesame").completions.create(model="m", prompt=[5], max_tokens=1).choices


def test_one_right_api_key_is_enough_in_utf_8_or_latin_1():
    """curl sends letters beyond ASCII as UTF-8, Python's clients some as Latin-1."""
    with running(fake_service(), ServerSettings(api_key="cl\u00e9")) as server:

        def status(**headers):
            return server.http.get("/v1/models", headers=headers).status_code

        for right in ("cl\u00e9".encode(), "cl\u00e9".encode("latin-1")):
            assert status(authorization=b"Bearer " + right) == status(**{"x-api-key": right}) == 200
            assert status(authorization=b"Bearer wrong", **{"x-api-key": right}) == 200
            assert status(authorization=b"Bearer " + right, **{"x-api-key": b"wrong"}) == 200
            assert status(authorization=b"Basic " + right, **{"x-api-key": b"wrong"}) == 401
        assert status(authorization=b"Bearer cl") == status(authorization=b"Bearer cl\xc3") == 401


def test_large_bodies_are_not_read_to_their_end():
    with running(fake_service(), ServerSettings(max_body_bytes=1000)) as server:
        assert server.post(COMPLETIONS, {"prompt": [5] * 200}).status_code == 400  # too long a prompt, not a body
        assert error_of(server.post(COMPLETIONS, {"prompt": [5] * 600}), 413)["code"] == "body_too_large"


def test_what_no_tier_can_hold_is_said_of_the_prompt_or_of_the_output():
    with running(fake_service()) as server:  # 8 blocks of 4
        for prompt, max_tokens, param in (([5] * 33, 1, "prompt"), ([5] * 30, 34, "max_tokens"), ([5] * 32, 2, None)):
            answer = server.post(COMPLETIONS, {"prompt": prompt, "max_tokens": max_tokens})
            if param is None:
                assert answer.status_code == 200
            else:
                error = error_of(answer)
                assert error["param"] == param and error["code"] == "context_length_exceeded"


def test_a_model_without_tokenizer_speaks_in_tokens():
    with running(fake_service()) as server:
        answer = server.post(COMPLETIONS, {"prompt": [5, 6], "max_tokens": 3, "ignore_eos": True, "logprobs": 0}).json()
        assert answer["choices"][0]["text"] == "" and answer["usage"]["completion_tokens"] == 3
        assert all(token.startswith("token_id:") for token in answer["choices"][0]["logprobs"]["tokens"])
        for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HELLO}), ("/tokenize", {"prompt": "a"})):
            assert "no tokenizer" in error_of(server.post(path, body))["message"]


def test_a_model_without_chat_template_says_so(tmp_path):
    folder = make_tiny_tokenizer(make_tiny_llama(tmp_path / "plain"), chat_template=None)
    engine = LLM(str(folder), device="cpu", dtype="float32", num_gpu_blocks=8, num_cpu_blocks=8).engine
    with running(EngineService(engine)) as server:
        assert "no chat template" in error_of(server.post(CHAT, {"messages": HELLO}))["message"]


def test_clients_are_told_no_more_than_the_pools_hold():
    engine = fake_engine("swiftllm", num_gpu_blocks=8, num_cpu_blocks=0, block_size=4, max_model_len=100)
    context = ServingContext(SimpleNamespace(ready=EngineService(engine).ready(), tokenizer=None), ServerSettings())
    assert context.request_limits.longest_request == model_card(context)["max_model_len"] == 33
    engine.make_request("fits", [1] * 30, SamplingParams(max_tokens=3))
    with pytest.raises(RequestRefused):
        engine.make_request("does not", [1] * 31, SamplingParams(max_tokens=3))


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (RequestRefused("too long"), 400, "invalid_request_error"),
        (QueueFull(5, 3), 429, "rate_limit_error"),
        (ServiceStopping("stalled"), 503, "service_unavailable_error"),
        (RequestFailed("deadline", "late"), 504, "timeout_error"),
        (RequestFailed("shutdown", "bye"), 503, "service_unavailable_error"),
        (RequestFailed("engine_error", "broken"), 500, "server_error"),
        (RequestFailed("invalid_grammar", "a dead end"), 400, "invalid_request_error"),
        (RequestFailed("stalled", "stuck"), 500, "server_error"),
        (KeyError("oops"), 500, "server_error"),
    ],
)
def test_what_each_failure_is_called(error, status, kind):
    answer = as_api_error(error)
    assert isinstance(answer, ApiError)
    response = answer.response()
    assert response.status_code == status and json.loads(response.body)["error"]["type"] == kind
    assert response.headers.get("Retry-After") == ("3" if status == 429 else None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", -1),
        ("port", 70000),
        ("max_body_bytes", 0),
        ("api_key", ""),
        ("allowed_origins", ("*", "http://x/")),
        ("generation_config", "vllm"),
        ("chat_template", "/no/such/file"),
    ],
)
def test_bad_settings_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        ServerSettings(**{field: value})
