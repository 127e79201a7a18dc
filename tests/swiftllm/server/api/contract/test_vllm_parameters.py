"""vLLM's additions to the parameters of a request and of the server, beside the same model offline."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from swiftllm import SamplingParams
from swiftllm.llm import LLM
from swiftllm.server.answer import that_fit
from swiftllm.server.engine_process import EngineService
from swiftllm.server.settings import ServerSettings
from tests.reference.fake_engine import fake_engine
from tests.reference.tiny_model import make_tiny_llama
from tests.reference.tiny_tokenizer import make_tiny_tokenizer
from tests.swiftllm.server.api.test_errors import CHAT, COMPLETIONS, HELLO, error_of
from tests.swiftllm.server.http_server import TIMEOUT_S, Gate, running

PROMPT = "Once upon a time the queen said: 'an inn?'"
GREEDY = {"prompt": PROMPT, "temperature": 0}


def text_of(answer):
    return answer.json()["choices"][0]["text"]


def offline(llm, prompt=PROMPT, **how):
    return llm.generate(prompt, SamplingParams(**how))[0]


# -- which tokens may come ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
def test_an_output_has_its_least_length(server, llm, n):
    stops = list(range(2, 100))  # so most tokens would end it at once
    body = {**GREEDY, "temperature": 1, "seed": 4, "n": n, "stop_token_ids": stops, "max_tokens": 40}
    short = server.post(COMPLETIONS, body).json()
    assert short["usage"]["completion_tokens"] < 12 * n
    answer = server.post(COMPLETIONS, {**body, "min_tokens": 12, "return_token_ids": True}).json()
    for number, choice in enumerate(answer["choices"]):
        how = dict(max_tokens=40, min_tokens=12, temperature=1.0, seed=4 + number, stop_token_ids=stops)
        assert choice["token_ids"] == list(offline(llm, **how).token_ids)
        assert not set(choice["token_ids"][:12]) & set(stops) and len(choice["token_ids"]) > 12


def test_stop_strings_are_looked_for_after_the_least_length(server, llm):
    text = offline(llm, max_tokens=40).text
    stop = text[3]
    assert text_of(server.post(COMPLETIONS, {**GREEDY, "max_tokens": 40, "stop": stop})) == text[: text.find(stop)]
    output = offline(llm, max_tokens=40, ignore_eos=True)
    head = llm.engine.tokenizer.decode(output.token_ids[:20])
    body = {**GREEDY, "max_tokens": 40, "stop": [stop, output.text[len(head) + 5]], "min_tokens": 20}
    end = min(place for what in body["stop"] if (place := output.text.find(what, len(head))) >= 0)
    assert text_of(server.post(COMPLETIONS, {**body, "ignore_eos": True})) == output.text[:end]


def test_bad_words_do_not_come(server, llm):
    text = offline(llm, max_tokens=30, ignore_eos=True).text
    words = sorted({char for char in text if not char.isspace() and char != "�"})[:5]
    answer = server.post(COMPLETIONS, {**GREEDY, "max_tokens": 30, "ignore_eos": True, "bad_words": words})
    tokens = tuple(tuple(llm.engine.tokenizer.encode(space + word)) for word in words for space in ("", " "))
    expected = offline(llm, max_tokens=30, ignore_eos=True, bad_words=tokens).text
    assert text_of(answer) == expected != text


def test_only_allowed_tokens_come(server, llm):
    body = {**GREEDY, "max_tokens": 20, "allowed_token_ids": [40, 41, 42], "return_token_ids": True}
    tokens = server.post(COMPLETIONS, body).json()["choices"][0]["token_ids"]
    assert tokens == list(offline(llm, max_tokens=20, allowed_token_ids=(40, 41, 42)).token_ids)
    assert set(tokens) <= {40, 41, 42} and len(tokens) == 20


# -- the prompt --------------------------------------------------------------------------------------------------------


def test_the_last_tokens_of_a_prompt_are_kept(server, llm):
    tokens = llm.engine.tokenizer.encode(PROMPT)
    for prompt in (PROMPT, tokens):
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 8, "truncate_prompt_tokens": 7, "echo": True}
        answer = server.post(COMPLETIONS, body).json()
        assert answer["usage"]["prompt_tokens"] == 7
        text = llm.engine.tokenizer.decode(tokens[-7:]) + offline(llm, tokens[-7:], max_tokens=8).text
        assert answer["choices"][0]["text"] == text
    whole = server.post(COMPLETIONS, {**GREEDY, "truncate_prompt_tokens": 300}).json()
    assert whole["usage"]["prompt_tokens"] == len(tokens)


def test_a_prompt_may_be_cut_to_what_fits(server):
    long = {"truncate_prompt_tokens": -1, "max_tokens": 12, "ignore_eos": True}
    usage = server.post(COMPLETIONS, {"prompt": "1" * 2000, **long}).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (500, 12)
    messages = [{"role": "user", "content": "1" * 2000}]
    usage = server.post(CHAT, {"messages": messages, **long}).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (500, 12)


# -- the answer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_token_ids_are_shown(server, llm, path):
    tokenizer, is_chat = llm.engine.tokenizer, path == CHAT
    prompt = tokenizer.apply_chat_template(HELLO) if is_chat else tokenizer.encode(PROMPT)
    made = list(offline(llm, prompt, max_tokens=9).token_ids)
    body = {"prompt": PROMPT, "messages": HELLO, "max_tokens": 9, "temperature": 0, "return_token_ids": True, "n": 2}
    answer = server.post(path, body).json()
    for choice in answer["choices"]:
        assert choice["token_ids"] == made
        assert (answer if is_chat else choice)["prompt_token_ids"] == prompt
    events = server.post(path, {**body, "stream": True}).text.split("\n\n")
    found, prompts = {0: [], 1: []}, []
    for event in events[:-2]:
        chunk = json.loads(event.removeprefix("data: "))
        (choice,) = chunk["choices"]
        found[choice["index"]] += choice.get("token_ids", [])
        prompts += [where["prompt_token_ids"] for where in (chunk, choice) if "prompt_token_ids" in where]
    assert found == {0: made, 1: made} and prompts == [prompt] * 2
    assert "token_ids" not in server.post(path, {**body, "return_token_ids": False}).text


def test_tokens_after_a_stop_string_are_not_shown(server, llm):
    output = offline(llm, max_tokens=40)
    stop = output.text[len(output.text) // 2 :][:3]
    body = {**GREEDY, "max_tokens": 40, "stop": stop, "return_token_ids": True}
    answer = server.post(COMPLETIONS, body).json()
    shown = answer["choices"][0]["token_ids"]
    assert shown == list(output.token_ids[: len(shown)]) and len(shown) == answer["usage"]["completion_tokens"] < 40


def test_an_answer_has_the_clients_id(server):
    for path, kind in ((COMPLETIONS, "cmpl"), (CHAT, "chatcmpl")):
        for number in range(2):
            body = {"prompt": "a", "messages": HELLO, "max_tokens": 2, "request_id": f"my-own-{number}"}
            assert server.post(path, body).json()["id"] == f"{kind}-my-own-{number}"


def test_load_counts_what_is_open_and_ids_are_unique_meanwhile():
    engine = fake_engine("swiftllm", num_gpu_blocks=8, num_cpu_blocks=0)
    gate = Gate(engine)
    with running(EngineService(engine)) as server:
        assert server.http.get("/load").json() == {"server_load": 0}
        body = {"prompt": [5], "max_tokens": 3, "n": 2, "request_id": "one"}
        waiting = threading.Thread(target=server.post, args=(COMPLETIONS, body))
        waiting.start()
        while server.http.get("/load").json() != {"server_load": 2}:
            assert waiting.is_alive()
        assert "already in use" in error_of(server.post(COMPLETIONS, body))["message"]
        gate.open()
        waiting.join(TIMEOUT_S)
        assert server.http.get("/load").json() == {"server_load": 0}


# -- what the model's authors and the server's owner say ---------------------------------------------------------------


def serve(model: Path, **settings):
    engine = LLM(str(model), device="cpu", dtype="float32", num_gpu_blocks=8, num_cpu_blocks=8).engine
    return running(EngineService(engine), ServerSettings(**settings))


def test_sampling_defaults_are_the_models(tmp_path, llm):
    own = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.2}
    model = make_tiny_tokenizer(make_tiny_llama(tmp_path / "own"))
    path = model / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | own | {"max_new_tokens": 3, "do_sample": True}))
    how = {"max_tokens": 20, "seed": 3, "ignore_eos": True}
    texts = {}
    for setting in ("auto", "none"):
        with serve(model, generation_config=setting) as server:
            texts[setting] = text_of(server.post(COMPLETIONS, {"prompt": PROMPT, **how}))
            given = {"temperature": 0.0, "repetition_penalty": 1.0}
            assert text_of(server.post(COMPLETIONS, {"prompt": PROMPT, **how, **given})) == offline(llm, **how).text
    assert texts["auto"] == offline(llm, **how, **own).text
    assert texts["none"] == offline(llm, **how, temperature=1.0).text != texts["auto"]


def test_the_models_limit_counts_where_a_request_has_none(tmp_path):
    """As in vLLM, whose completions have 16 tokens by themselves."""
    model = make_tiny_tokenizer(make_tiny_llama(tmp_path / "own"))
    path = model / "generation_config.json"

    def lengths(most):
        path.write_text(json.dumps({"max_new_tokens": most}))
        how = {"messages": HELLO, "ignore_eos": True}
        bodies = ((CHAT, how), (CHAT, {**how, "max_tokens": 9}), (COMPLETIONS, {"prompt": PROMPT, "ignore_eos": True}))
        with serve(model) as server:
            return [server.post(place, body).json()["usage"]["completion_tokens"] for place, body in bodies]

    assert lengths(7) == [7, 9, 7]
    assert lengths(20) == [20, 9, 16]
    assert that_fit(None, 100, 60, 10**6) == 40


def test_the_servers_chat_template_comes_first(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}[{{ message.content }}]{% endfor %}")
    for name, own in (("plain", None), ("other", "{{ messages }}")):
        model = make_tiny_tokenizer(make_tiny_llama(tmp_path / name), chat_template=own)
        with serve(model, chat_template=str(template)) as server:
            tokens = server.post("/tokenize", {"messages": HELLO}).json()["tokens"]
            assert tokens == server.post("/tokenize", {"prompt": "[Hello]"}).json()["tokens"]
            assert server.post(CHAT, {"messages": HELLO, "max_tokens": 2}).status_code == 200
