"""Messages between front end and engine: cut out of any pieces, and what several requests share is in them once."""

from __future__ import annotations

import random

from swiftllm.core.request import SamplingParams
from swiftllm.scheduling.validation import as_token_array
from swiftllm.server.engine_process import EngineService
from swiftllm.server.messages import End, Frames, Message, NewRequest, ResetPrefixCache, Submit, decode_to_engine, frame
from tests.reference.fake_engine import fake_engine

BIAS = {token: 1.0 for token in range(40)}


class Counted(bytearray):
    """Counts the bytes that are added to it."""

    added = 0

    def __iadd__(self, data: bytes) -> Counted:
        Counted.added += len(data)
        return super().__iadd__(data)


def test_messages_are_whole_however_they_are_cut() -> None:
    sent: list[Message] = [End([*range(count)], "x" * count) for count in (0, 1, 300, 70_000, 2)] + [ResetPrefixCache()]
    stream = b"".join(map(frame, sent))
    rng = random.Random(1)
    for most in (1, 3, 5000, len(stream)):
        frames, found, place = Frames(), [], 0
        while place < len(stream):
            size = rng.randint(1, most)
            found += map(decode_to_engine, frames.feed(stream[place : place + size]))
            place += size
        assert found == sent


def test_a_message_in_many_parts_is_collected_once() -> None:
    message = frame(End([1], "x" * 100_000))
    frames, found = Frames(), []
    frames._rest, Counted.added = Counted(), 0
    for place in range(0, len(message), 10):
        found += frames.feed(message[place : place + 10])
    assert len(found) == 1 and Counted.added <= len(message)


def shared_requests(count: int) -> list[NewRequest]:
    prompt = as_token_array([1, 2, 3])
    sampling = SamplingParams(max_tokens=4, logit_bias=BIAS, allowed_token_ids=range(40), bad_words=((1, 2),), seed=1)
    return [NewRequest(f"r{number}", prompt, sampling.varied(seed=number)) for number in range(count)]


def test_what_requests_share_is_sent_once_and_is_there_once() -> None:
    one, many = (Submit.of(shared_requests(count), range(count), [None] * count) for count in (1, 100))
    assert len(frame(many)) < len(frame(one)) + 100 * 80
    service = EngineService(fake_engine("swiftllm", num_gpu_blocks=8, num_cpu_blocks=0))
    message = decode_to_engine(frame(many)[4:])
    service._accept(message, message.requests, None)
    requests = [entry.request for entry in service._open_requests.entries.values()]
    for name in ("logit_bias", "allowed_token_ids", "bad_words"):
        assert len({id(getattr(request.sampling, name)) for request in requests}) == 1
    assert len({id(request.prompt_token_ids) for request in requests}) == 1
    assert [request.sampling for request in requests] == [new.sampling for new in shared_requests(100)]
    assert requests[0].sampling.logit_bias.arrays is requests[1].sampling.logit_bias.arrays
    service.close()


def test_requests_that_share_nothing_keep_what_is_theirs() -> None:
    news = [
        NewRequest("a", as_token_array([1]), SamplingParams(max_tokens=3, logit_bias={1: 2.0}, temperature=0.5)),
        NewRequest("b", as_token_array([2, 3]), SamplingParams(top_k=4, stop_token_ids=(5,))),
    ]
    service = EngineService(fake_engine("swiftllm", num_gpu_blocks=8, num_cpu_blocks=0))
    message = decode_to_engine(frame(Submit.of(news, [0, 1], [None, 2.0]))[4:])
    service._accept(message, message.requests, None)
    requests = [entry.request for entry in service._open_requests.entries.values()]
    assert [request.sampling for request in requests] == [new.sampling for new in news]
    assert [list(request.prompt_token_ids) for request in requests] == [[1], [2, 3]]
    service.close()
