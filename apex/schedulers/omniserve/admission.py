"""Admission control (OmniServe section 3.3.3): when a latency-sensitive request would have its first token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from apex.perf.gpu_batch_load import GpuBatchLoad, context_tokens
from apex.perf.model import PerfModel
from apex.schedulers.lengths import LengthsSeen
from apex.schedulers.omniserve.gpu_batch import BEST_EFFORT, URGENT, prompt_lengths
from apex.schedulers.omniserve.times import PromptLeft, iteration_s, urgent_chunk_tokens, with_prompts
from swiftllm.core.request import Request, Tier
from swiftllm.core.slo import Slo
from swiftllm.scheduling.state import SchedulerState


@dataclass(frozen=True)
class Backlog:
    """The latency-sensitive work before and including a request. Best-effort work makes way, so it does not count."""

    decodes: int
    decode_context: int
    """Context of the decodes, summed, in tokens."""
    prompts: Sequence[PromptLeft]
    """In order of service, the request's own last."""
    missing_blocks: int
    """GPU blocks that those who wait lack now."""
    missing_seats: int
    """Places among the requests that may run at once that those who wait lack now."""
    prompt_blocks: int
    """GPU blocks of the decodes' prompts."""
    mean_output: float
    """Output tokens after which a decode ends, on average."""

    @property
    def load(self) -> GpuBatchLoad:
        """The GPU batch without prompts."""
        return GpuBatchLoad(self.decodes, self.decodes, self.decodes, self.decode_context, ())


def backlog_before(request: Request, state: SchedulerState, lengths: LengthsSeen) -> Backlog:
    """The backlog of a latency-sensitive request that arrives now."""
    decodes = [r for tier in Tier for r in state.decoding[tier].of_class(URGENT)]
    prompts = [*state.prefilling.of_class(URGENT), *state.waiting.of_class(URGENT)]
    return Backlog(
        decodes=len(decodes),
        decode_context=context_tokens(decodes),
        prompts=prompt_lengths([*prompts, request]),
        missing_blocks=_missing_blocks(request, state),
        missing_seats=max(0, len(decodes) + len(prompts) + 1 - state.limits.max_num_seqs),
        prompt_blocks=sum([state.kv.blocks_for(r.prompt_len) for r in decodes]),
        mean_output=lengths.mean_output([r.output_len for r in decodes]),
    )


def _missing_blocks(request: Request, state: SchedulerState) -> int:
    """GPU blocks that this request and those before it lack, if all best-effort requests made way.

    Every running request is left the reserve of :class:`~swiftllm.scheduling.rules.SchedulingRules`.
    """
    kv, queue, running = state.kv, [*state.waiting.of_class(URGENT), request], state.running[Tier.GPU]
    reserved = kv.groups.growth * (len(queue) + len(running.of_class(URGENT)))
    wanted = sum([kv.blocks_for(r.num_tokens) for r in queue]) + reserved
    yielded = sum(map(kv.num_held, running.of_class(BEST_EFFORT)))
    return max(0, wanted - yielded - kv.num_free(Tier.GPU))


def first_token_s(model: PerfModel, slo: Slo, backlog: Backlog, budget: int) -> float:
    """Seconds until the last of the prompts has its token: for all prompts, or for their blocks or seats and itself.

    Args:
        budget: the most tokens of an iteration.
    """
    single_s = prefill_s(model, slo, replace(backlog, prompts=backlog.prompts[-1:]), budget)
    wait_s = max(blocks_s(model, slo, backlog), seats_s(model, slo, backlog))
    return max(prefill_s(model, slo, backlog, budget), wait_s + single_s)


def prefill_s(model: PerfModel, slo: Slo, backlog: Backlog, budget: int) -> float:
    """Seconds until all prompts are computed, in iterations that are filled up to the target.

    The paper predicts a single pass over all outstanding prompts. That leaves out the decodes, which every chunk
    repeats. So this counts the iterations for R tokens in chunks of q: the whole part of R / q, and one for the rest.
    Decodes are taken as constant: about as many end as prompts become decodes.
    """
    load, prompts = backlog.load, backlog.prompts
    total = sum([prompt.tokens for prompt in prompts])
    most = max(1, budget - backlog.decodes)
    chunk = urgent_chunk_tokens(model, load, prompts, slo.iteration_s, most)
    full, rest = divmod(total, chunk)
    full_s = iteration_s(model, with_prompts(load, prompts, chunk))
    return full * full_s + (iteration_s(model, with_prompts(load, prompts, rest)) if rest else 0.0)


def blocks_s(model: PerfModel, slo: Slo, backlog: Backlog) -> float:
    """Seconds until the decodes have freed the missing blocks, if they end at their mean rate. (Not in the paper.)

    Those that go on grow by as many tokens as those that end have put out. So what comes free are the prompts' blocks.
    Iterations count as long as the target allows, although they may be shorter: when decodes end is a matter of chance,
    and of requests for which the mean is in time half would be late.
    """
    if not backlog.missing_blocks:
        return 0.0
    if not backlog.prompt_blocks:
        return float("inf")  # prompts hold them all, and end later than their first token
    freed_per_s = backlog.prompt_blocks / output_s(model, slo, backlog)
    return backlog.missing_blocks / freed_per_s


def seats_s(model: PerfModel, slo: Slo, backlog: Backlog) -> float:
    """Seconds until as many decodes have ended as seats are missing, counted as in :func:`blocks_s`."""
    if not backlog.missing_seats:
        return 0.0
    if not backlog.decodes:
        return float("inf")
    return backlog.missing_seats * output_s(model, slo, backlog) / backlog.decodes


def output_s(model: PerfModel, slo: Slo, backlog: Backlog) -> float:
    """Seconds for the mean output of a decode."""
    return backlog.mean_output * max(slo.iteration_s, iteration_s(model, backlog.load))
