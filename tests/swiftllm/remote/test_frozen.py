"""A host that stops for a while holds up its own requests and no others."""

from __future__ import annotations

import os
import signal

from swiftllm.core.request import SamplingParams, Tier
from swiftllm.remote.protocol import FrameKind
from tests.swiftllm.remote.hosts import SECRET, start_host_process
from tests.swiftllm.remote.test_deaths import on_host, remote, step_until
from tests.swiftllm.remote.test_tokens import BLOCK_BYTES, MAX_TOKENS, open_engine, run_to_end, tiny  # noqa: F401

SILENCE_S = 20.0  # so that the host does not count as dead, however slow this machine is
NUM_REQUESTS = 14
TOKENS = 6  # more than an iteration gives


def test_requests_on_the_gpu_get_tokens_while_a_host_is_frozen(tiny, monkeypatch) -> None:  # noqa: F811
    """Requests of the frozen host are wanted on the GPU meanwhile. They get the same tokens once it goes on.

    Under asynchronous overlap, where the GPU batch waits for no CPU batch.
    """
    monkeypatch.setenv("APEX_HOST_SECRET", SECRET.decode())
    monkeypatch.setattr("swiftllm.remote.tier.SILENCE_S", SILENCE_S)
    model_dir, prompts, expected = tiny
    process, address = start_host_process(120 * BLOCK_BYTES)
    try:
        pools = {"num_gpu_blocks": 60, "num_cpu_blocks": 20, "max_model_len": 90}
        engine = open_engine(model_dir, "apex-overlap", [address], **pools)
        first = engine.kv.host_pools.pools[1].first
        returned, swap = [], engine.backend.swap

        def noted(swaps):
            returned.extend(s.request.request_id for s in swaps if s.source is Tier.CPU and s.source_blocks[0] >= first)
            swap(swaps)

        monkeypatch.setattr(engine.backend, "swap", noted)
        requests = [  # the first one stays on the GPU
            engine.add(engine.make_request(str(i), prompt, SamplingParams(8 if i else MAX_TOKENS)))
            for i, prompt in enumerate(prompts[:NUM_REQUESTS])
        ]
        state = engine.state
        step_until(engine, lambda: not state.waiting and not state.prefilling and bool(on_host(engine, 1)))
        there = on_host(engine, 1)
        os.kill(process.pid, signal.SIGSTOP)
        returned.clear()
        channel, wanted = remote(engine).channel, []
        ask = channel.ask

        def noted_ask(header, *rest, **more):
            wanted.append(header.kind)
            return ask(header, *rest, **more)

        monkeypatch.setattr(channel, "ask", noted_ask)
        tokens = 0
        while tokens < TOKENS:
            outputs = engine.step()
            assert not channel.is_dead, f"a step waited for the host after {tokens} tokens"
            if FrameKind.GET in wanted:
                tokens += sum(len(output.new_token_ids) for output in outputs)
        os.kill(process.pid, signal.SIGCONT)
        run_to_end(engine)
        assert there & set(returned), "no request of the frozen host was wanted on the GPU"
        for request, whole in zip(requests, expected, strict=False):
            assert tuple(request.output_token_ids) == whole[: request.sampling.max_tokens]
        assert engine.stats().host_deaths == 0
        engine.close()
    finally:
        process.kill()
        process.wait()
