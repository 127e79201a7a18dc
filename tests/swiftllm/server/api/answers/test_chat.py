"""How a conversation becomes a prompt: what a request may say of it."""

import pytest

from swiftllm import SamplingParams

USER, ASSISTANT = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "the end"}


@pytest.mark.parametrize(
    ("messages", "options", "prompt"),
    [
        ([USER], {}, "<s>user: Hello</s>\n<s>assistant:"),
        ([USER], {"add_generation_prompt": False}, "<s>user: Hello</s>\n"),
        (
            [USER, ASSISTANT],
            {"add_generation_prompt": False, "continue_final_message": True},
            "<s>user: Hello</s>\n<s>assistant: the end",
        ),
        ([USER], {"chat_template_kwargs": {"thoughts": " none"}}, "<s>user: Hello</s>\n<s>assistant: none"),
        ([USER], {"chat_template_kwargs": None}, "<s>user: Hello</s>\n<s>assistant:"),
    ],
)
def test_options_of_the_template(server, llm, messages, options, prompt):
    tokens = llm.engine.tokenizer.encode(prompt, add_special_tokens=False)
    body = {"messages": messages, **options}
    assert server.post("/tokenize", body).json()["tokens"] == tokens
    answer = server.post("/v1/chat/completions", {**body, "max_tokens": 8, "temperature": 0}).json()
    assert answer["choices"][0]["message"]["content"] == llm.generate([tokens], SamplingParams(max_tokens=8))[0].text
