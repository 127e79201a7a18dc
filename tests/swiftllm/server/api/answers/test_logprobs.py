"""Log-probabilities of outputs and prompts through the `openai` client, beside the same model offline."""

import pytest

from swiftllm import SamplingParams

PROMPT = "Once upon a time the queen said: 'an inn?'"
GREEDY = {"model": "tiny-chat", "temperature": 0.0}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_completion(server, llm, stream):
    answer = server.client().completions.create(prompt=PROMPT, max_tokens=6, logprobs=2, stream=stream, **GREEDY)
    parts = [chunk.choices[0].logprobs for chunk in (answer if stream else [answer])]
    output = llm.generate(PROMPT, SamplingParams(max_tokens=6, logprobs=2))[0].token_ids
    tokens = [token for part in parts for token in part.tokens]
    assert tokens == [llm.engine.tokenizer.decode([t], skip_special_tokens=False) for t in output]
    logprobs = [logprob for part in parts for logprob in part.token_logprobs]
    top = [entry for part in parts for entry in part.top_logprobs]
    assert all(logprob == max(entry.values()) < 0 for logprob, entry in zip(logprobs, top, strict=True)), "greedy"
    offsets = [offset for part in parts for offset in part.text_offset]
    assert offsets == [len("".join(tokens[:number])) for number in range(6)]


def joined(parts):
    """The log-probabilities of all chunks of a choice as one."""
    parts = [part for part in parts if part is not None]
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [value for part in parts for value in getattr(part, name)] for name in names}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("as_text", [True, False])
def test_an_echo_has_the_logprobs_of_the_prompt(server, llm, stream, max_tokens, as_text):
    tokenizer = llm.engine.tokenizer
    token_ids = tokenizer.encode(PROMPT)
    prompt = PROMPT if as_text else token_ids
    options = dict(prompt=prompt, max_tokens=max_tokens, logprobs=2, echo=True, n=2, **GREEDY)
    answer = server.client().completions.create(**options, stream=stream)
    sampling = SamplingParams(max_tokens=max(max_tokens, 1), logprobs=2, prompt_logprobs=2)
    output = llm.generate(token_ids, sampling)[0]
    made = list(output.token_ids)[:max_tokens]
    chunks = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    for index in range(2):
        choices = [choice for choice in chunks if choice.index == index]
        assert "".join(choice.text for choice in choices) == tokenizer.decode(token_ids) + tokenizer.decode(made)
        assert choices[-1].finish_reason == "length"
        found = joined(choice.logprobs for choice in choices)
        texts = [tokenizer.decode([token], skip_special_tokens=False) for token in (*token_ids, *made)]
        assert found["tokens"] == texts
        assert found["text_offset"] == [len("".join(texts[:number])) for number in range(len(texts))]
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        own = [entry.logprob for entry in output.prompt_logprobs]
        assert found["token_logprobs"][1 : len(token_ids)] == pytest.approx(own, abs=1e-4)
        rows = zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True)
        assert all(len(top) <= 3 and top[text] >= logprob for text, logprob, top in list(rows)[1:])
    if not stream:
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(token_ids), 2 * max_tokens)


def test_what_evaluation_harnesses_ask(server, llm):
    """Contexts and continuations as token ids, several in one request; of the continuations, how likely they are and
    whether they are what the model would have said."""
    context = llm.engine.tokenizer.encode(PROMPT)
    likely = list(llm.generate(context, SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids)
    prompts = [context + likely, [*context, 5, 6, 7, 8]]
    body = {"model": "tiny-chat", "prompt": prompts, "temperature": 0, "logprobs": 1, "seed": 1234, "echo": True}
    for max_tokens, end in ((1, -1), (0, None)):
        choices = server.post("/v1/completions", {**body, "max_tokens": max_tokens}).json()["choices"]
        greedy = []
        for choice in sorted(choices, key=lambda choice: choice["index"]):
            part = slice(len(context), end)
            logprobs, top = (choice["logprobs"][name][part] for name in ("token_logprobs", "top_logprobs"))
            assert len(logprobs) == len(top) == 4 and all(logprob < 0 for logprob in logprobs)
            greedy.append(all(logprob == max(best.values()) for logprob, best in zip(logprobs, top, strict=True)))
        assert greedy == [True, False]


def check_prompt_logprobs(found, token_ids, llm):
    """``found`` has vLLM's form: by token id as text, the prompt's own token first."""
    expected = llm.generate(token_ids, SamplingParams(max_tokens=1, prompt_logprobs=2))[0].prompt_logprobs
    assert found[0] is None and len(found) == len(token_ids) == len(expected) + 1
    ranks = set()
    for tokens, entry in zip(found[1:], expected, strict=True):
        by_id = dict([(entry.token_id, entry.logprob), *entry.top])
        assert list(tokens) == [str(token_id) for token_id in by_id]
        assert [each["logprob"] for each in tokens.values()] == pytest.approx(list(by_id.values()), abs=1e-4)
        assert [each["decoded_token"] for each in tokens.values()] == list(map(llm.engine.tokenizer.text_alone, by_id))
        likely = [token_id for token_id, _ in entry.top]
        assert [tokens[str(token_id)]["rank"] for token_id in likely] == [1, 2]
        ranks.add(tokens[str(entry.token_id)]["rank"])
        if entry.token_id not in likely:
            assert tokens[str(entry.token_id)]["rank"] == entry.rank > 2
    return ranks


def test_prompt_logprobs_of_completions(server, llm):
    likely = list(llm.generate([5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids)
    prompts = [[5, 6, 7, *likely], llm.engine.tokenizer.encode(PROMPT)]
    body = {"prompt": prompts, "max_tokens": 1, "prompt_logprobs": 2}
    choices = server.post("/v1/completions", body).json()["choices"]
    ranks = [
        check_prompt_logprobs(choice["prompt_logprobs"], prompt, llm)
        for prompt, choice in zip(prompts, choices, strict=True)
    ]
    assert 1 in ranks[0] and max(ranks[1]) > 2, "a token that is not among the most likely has its rank, too"
    assert all(choice["logprobs"] is None for choice in choices)
    echoed = server.post("/v1/completions", {**body, "echo": True, "logprobs": 0}).json()["choices"]
    for choice, plain in zip(echoed, choices, strict=True):
        own = [next(iter(tokens.values()))["logprob"] for tokens in plain["prompt_logprobs"][1:]]
        assert choice["logprobs"]["token_logprobs"][1:-1] == pytest.approx(own, abs=1e-4)
        assert list(choice["prompt_logprobs"][1]) == list(plain["prompt_logprobs"][1])
    unasked = server.post("/v1/completions", {**body, "prompt_logprobs": None}).json()["choices"]
    assert all(choice["prompt_logprobs"] is None for choice in unasked)


def test_prompt_logprobs_of_a_chat(server, llm):
    body = {"messages": MESSAGES, "max_tokens": 1, "n": 2, "prompt_logprobs": 2}
    answer = server.post("/v1/chat/completions", body).json()
    check_prompt_logprobs(answer["prompt_logprobs"], llm.engine.tokenizer.apply_chat_template(MESSAGES), llm)
    assert not any("prompt_logprobs" in choice for choice in answer["choices"])


def test_an_echo_alone(server, llm):
    answer = server.client().completions.create(prompt=PROMPT, max_tokens=0, echo=True, **GREEDY).choices[0]
    assert (answer.text, answer.logprobs, answer.finish_reason) == (PROMPT, None, "length")


def test_many_logprobs_are_written_beside_the_event_loop(server, llm):
    """And are none the less the same."""
    prompt = [5, 6, 7] * 60
    choice = server.client().completions.create(prompt=prompt, max_tokens=0, echo=True, logprobs=0, **GREEDY).choices[0]
    output = llm.generate(prompt, SamplingParams(max_tokens=1, prompt_logprobs=0))[0]
    own = [entry.logprob for entry in output.prompt_logprobs]
    assert choice.logprobs.token_logprobs == [None, *(pytest.approx(logprob, abs=1e-4) for logprob in own)]


def test_logprobs_of_a_chat(server):
    create = server.client().chat.completions.create
    entries = create(messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=3, **GREEDY).choices[0].logprobs
    assert [len(entry.top_logprobs) for entry in entries.content] == [3] * 4
    for entry in entries.content:
        assert entry.logprob == entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
        assert entry.bytes is None or bytes(entry.bytes).decode() == entry.token
    plain = create(messages=MESSAGES, max_tokens=4, logprobs=True, **GREEDY).choices[0].logprobs.content
    assert [entry.top_logprobs for entry in plain] == [[]] * 4
