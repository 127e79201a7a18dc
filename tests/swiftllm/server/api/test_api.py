"""The API against a tiny real model, through the `openai` client, beside the same model offline."""

import asyncio
import json
import threading
import time

import pytest

from swiftllm import SamplingParams
from swiftllm.model.tokenizer import LONG_TOKENS, Tokenizer
from swiftllm.server.context import LONG_TEXT_CHARS
from tests.swiftllm.server.http_server import TIMEOUT_S

PROMPT = "Once upon a time the queen said: 'an inn?'"
GREEDY = {"model": "tiny-chat", "temperature": 0.0}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}]


def offline_text(llm, prompt=PROMPT, max_tokens=40, **options):
    return llm.generate(prompt, SamplingParams(max_tokens=max_tokens, **options))[0].text


def stop_string(text):
    """Some characters of the middle of a text, and where they are first found."""
    middle = len(text) // 2
    stop = text[middle : middle + 3]
    return stop, text.find(stop)


# -- completions ------------------------------------------------------------------------------------------------------


def test_a_completion_is_what_the_engine_says_offline(server, llm):
    answer = server.client().completions.create(prompt=PROMPT, max_tokens=40, **GREEDY)
    prompt_tokens = len(llm.engine.tokenizer.encode(PROMPT))
    assert answer.choices[0].text == offline_text(llm) != ""
    assert answer.choices[0].finish_reason == "length" and answer.model == "tiny-chat"
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (prompt_tokens, 40, prompt_tokens + 40)


def test_token_ids_are_as_good_as_text(server, llm):
    token_ids = llm.engine.tokenizer.encode(PROMPT)
    answer = server.client().completions.create(prompt=token_ids, max_tokens=40, **GREEDY)
    assert answer.choices[0].text == offline_text(llm)


def test_defaults_are_those_of_the_api(server):
    create = server.client().completions.create
    answers = {create(model="tiny-chat", prompt=PROMPT).choices[0].text for _ in range(3)}
    assert len(answers) == 3, "the default temperature is 1"
    assert create(model="tiny-chat", prompt=PROMPT, extra_body={"ignore_eos": True}).usage.completion_tokens == 16


@pytest.mark.parametrize("prompts", [["one", "two and", "three"], [[5, 6, 7], [8, 9]]])
@pytest.mark.parametrize("stream", [False, True])
def test_choices_of_several_prompts_come_in_their_order(server, llm, prompts, stream):
    options = dict(prompt=prompts, n=2, max_tokens=8, seed=3, **{**GREEDY, "temperature": 0.7})
    answer = server.client().completions.create(**options, stream=stream)
    texts = [""] * (2 * len(prompts))
    for chunk in answer if stream else [answer]:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    expected = [
        offline_text(llm, prompt, max_tokens=8, temperature=0.7, seed=3 + number)
        for prompt in prompts
        for number in range(2)
    ]
    assert texts == expected
    assert texts[0] != texts[1]


def test_a_stream_gives_the_same_text_and_counts_its_tokens(server, llm):
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = server.client().completions.create(
        prompt=PROMPT, max_tokens=40, stream=True, stream_options=options, **GREEDY
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == offline_text(llm)
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "length"
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 40
    assert last.choices == [] and last.usage.completion_tokens == 40


def test_echo_repeats_the_prompt(server, llm):
    create = server.client().completions.create
    text = PROMPT + offline_text(llm, max_tokens=5)
    assert create(prompt=PROMPT, max_tokens=5, echo=True, **GREEDY).choices[0].text == text
    token_ids = llm.engine.tokenizer.encode(PROMPT)
    assert create(prompt=token_ids, max_tokens=5, echo=True, **GREEDY).choices[0].text == text
    chunks = create(prompt=PROMPT, max_tokens=5, echo=True, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in chunks) == text


# -- the end of a text ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_text(server, llm, stream, include):
    text = offline_text(llm)
    stop, place = stop_string(text)
    body = {"include_stop_str_in_output": include}
    answer = server.client().completions.create(
        prompt=PROMPT, max_tokens=40, stop=["never said", stop], stream=stream, extra_body=body, **GREEDY
    )
    chunks = list(answer) if stream else [answer]
    assert "".join(chunk.choices[0].text for chunk in chunks) == text[: place + (len(stop) if include else 0)]
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[-1].choices[0].model_extra["stop_reason"] == stop


def test_a_request_that_ended_by_a_stop_string_counts_as_stopped(server, llm):
    def ended(reason: str) -> float:
        name = f'finished_reason="{reason}"'
        lines = server.http.get("/metrics").text.splitlines()
        return sum(float(x.split()[-1]) for x in lines if x.startswith("vllm:request_success_total") and name in x)

    stop, _ = stop_string(offline_text(llm))
    before = ended("stop"), ended("abort")
    server.client().completions.create(prompt=PROMPT, max_tokens=40, stop=stop, **GREEDY)
    deadline_s = time.monotonic() + TIMEOUT_S
    while (ended("stop"), ended("abort")) != (before[0] + 1, before[1]):  # the engine takes its next step first
        assert time.monotonic() < deadline_s


def test_tokens_after_a_stop_string_are_not_counted(server, llm):
    stop, _ = stop_string(offline_text(llm))
    usage = server.client().completions.create(prompt=PROMPT, max_tokens=40, stop=stop, **GREEDY).usage
    stream, shown = llm.engine.tokenizer.stream(), ""
    output = llm.generate(PROMPT, SamplingParams(max_tokens=40))[0].token_ids
    needed = 0
    while stop not in shown:
        shown += stream.push(output[needed : needed + 1])
        needed += 1
    assert usage.completion_tokens == needed < 40


def test_a_stop_token_ends_the_text_and_is_no_part_of_it(server, llm):
    output = llm.generate(PROMPT, SamplingParams(max_tokens=40))[0].token_ids
    stop = output[10]
    body = {"stop_token_ids": [stop]}
    answer = server.client().completions.create(prompt=PROMPT, max_tokens=40, extra_body=body, **GREEDY)
    place = output.index(stop)
    assert answer.choices[0].text == llm.engine.tokenizer.decode(output[:place])
    assert answer.choices[0].finish_reason == "stop" and answer.choices[0].model_extra["stop_reason"] == stop
    assert answer.usage.completion_tokens == place + 1


def test_penalties_and_biases_are_those_of_the_engine(server, llm):
    own = {"presence_penalty": 0.6, "frequency_penalty": 0.3, "logit_bias": {"40": 3, "41": -100}}
    added = {"repetition_penalty": 1.4, "min_p": 0.05}
    create = server.client().completions.create
    for sampling in ({"temperature": 0.0}, {"temperature": 0.9, "seed": 5}):
        answer = create(model="tiny-chat", prompt=PROMPT, max_tokens=30, extra_body=added, **own, **sampling)
        biases = {int(token): bias for token, bias in own["logit_bias"].items()}
        text = offline_text(llm, max_tokens=30, **{**own, **added, **sampling, "logit_bias": biases})
        assert answer.choices[0].text == text != offline_text(llm, max_tokens=30, **sampling)


def test_a_bias_of_100_decides(server, llm):
    create = server.client().chat.completions.create
    answer = create(messages=MESSAGES, max_tokens=5, logit_bias={"50": 100}, model="tiny-chat", seed=1)
    assert answer.choices[0].message.content == llm.engine.tokenizer.decode([50] * 5)


# -- chat -------------------------------------------------------------------------------------------------------------


def test_a_chat_goes_through_the_models_template(server, llm):
    answer = server.client().chat.completions.create(messages=MESSAGES, max_tokens=20, **GREEDY)
    prompt = llm.engine.tokenizer.apply_chat_template(MESSAGES)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == offline_text(llm, prompt, max_tokens=20)
    assert answer.usage.prompt_tokens == len(prompt)


def test_content_may_come_in_parts(server):
    create = server.client().chat.completions.create
    parts = [{"role": "user", "content": [{"type": "text", "text": "Who "}, {"type": "text", "text": "are you?"}]}]
    whole = [{"role": "user", "content": "Who are you?"}]
    answers = [create(messages=messages, max_tokens=8, **GREEDY) for messages in (parts, whole)]
    assert answers[0].choices[0].message == answers[1].choices[0].message


def test_null_is_a_content_without_text(server):
    create = server.client().chat.completions.create
    messages = ({"role": "assistant", "content": None}, {"role": "assistant", "content": ""})
    answers = [create(messages=[*MESSAGES, message], max_tokens=8, **GREEDY) for message in messages]
    assert answers[0].choices[0].message == answers[1].choices[0].message


def test_a_chat_streams_its_role_first(server, llm):
    stream = server.client().chat.completions.create(
        messages=MESSAGES, n=2, max_completion_tokens=9, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    deltas = {0: [], 1: []}
    *chunks, last = list(stream)
    for chunk in chunks:
        deltas[chunk.choices[0].index].append(chunk.choices[0].delta)
    expected = offline_text(llm, llm.engine.tokenizer.apply_chat_template(MESSAGES), max_tokens=9)
    for of_choice in deltas.values():
        assert [delta.role for delta in of_choice] == ["assistant"] + [None] * (len(of_choice) - 1)
        assert "".join(delta.content for delta in of_choice) == expected
    assert last.usage.completion_tokens == 18


def test_a_chat_may_go_on_to_the_end_of_the_context(server):
    body = {"ignore_eos": True}
    answer = server.client().chat.completions.create(messages=MESSAGES, extra_body=body, **GREEDY)
    assert answer.usage.total_tokens == 512 and answer.choices[0].finish_reason == "length"


def test_the_async_client_runs_many_streams_at_once(server, llm):
    prompts = [f"{PROMPT} {number}" for number in range(12)]

    async def one(client, prompt):
        stream = await client.completions.create(prompt=prompt, max_tokens=12, stream=True, **GREEDY)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def run():
        async with server.async_client() as client:
            return await asyncio.gather(*(one(client, prompt) for prompt in prompts))

    assert asyncio.run(run()) == [output.text for output in llm.generate(prompts, SamplingParams(max_tokens=12))]


# -- the smaller paths ------------------------------------------------------------------------------------------------


def test_models(server):
    (model,) = server.client().models.list().data
    assert model.id == "tiny-chat" and model.model_extra["max_model_len"] == 512
    assert server.client().models.retrieve("tiny-chat") == model


def test_tokenize_and_detokenize(server, llm):
    tokenizer = llm.engine.tokenizer
    answer = server.post("/tokenize", {"prompt": "the inn", "return_token_strs": True}).json()
    tokens = tokenizer.encode("the inn")
    strings = ["the", "Ġ", "in", "n"]
    assert answer == {"count": 4, "max_model_len": 512, "tokens": tokens, "token_strs": strings}
    assert server.post("/tokenize", {"messages": MESSAGES}).json()["tokens"] == tokenizer.apply_chat_template(MESSAGES)
    assert server.post("/detokenize", {"tokens": [1, *tokens]}).json() == {"prompt": "<s>the inn"}
    many = tokens * LONG_TOKENS
    assert server.post("/detokenize", {"tokens": many}).json() == {"prompt": "the inn" * LONG_TOKENS}


def test_long_texts_are_tokenized_beside_the_event_loop(server, monkeypatch):
    threads = []
    encode = Tokenizer.encode

    def noted(*args):
        threads.append(threading.current_thread().name)
        return encode(*args)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    for length in (LONG_TEXT_CHARS, LONG_TEXT_CHARS + 1):
        assert server.post("/tokenize", {"prompt": "a" * length}).json()["count"] == length
    short, long = threads
    assert long.startswith("tokenizer") and not short.startswith("tokenizer")
    threads.clear()
    assert server.post("/v1/completions", {"prompt": ["a"] * 64, "max_tokens": 1}).status_code == 200
    assert len(threads) == 64 and all(name.startswith("tokenizer") for name in threads)


def test_small_pages(server):
    assert server.http.get("/health").text == "ok"
    for path in ("/health", "/ping", "/version", "/v1/models", "/"):
        answer = server.http.head(path)
        assert answer.status_code == 200 and not answer.content
    assert server.http.get("/ping").status_code == server.http.post("/ping").status_code == 200
    assert set(server.http.get("/version").json()) == {"version"}
    assert "vllm:num_requests_running" in server.http.get("/metrics").text
    assert server.http.get("/").headers["content-type"].startswith("text/html")


def test_events_are_plain_lines(server):
    """Clients that split lines by hand or by Unicode's rules must read every event whole."""
    body = {"prompt": PROMPT, "max_tokens": 12, "stream": True, "temperature": 0}
    events = server.post("/v1/completions", body).text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    for event in events[:-2]:
        assert event.isascii() and len(event.splitlines()) == 1
        assert json.loads(event.removeprefix("data: "))["object"] == "text_completion"
