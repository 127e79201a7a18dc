"""Steps that raise: nothing is lost, the one request to blame is found, and the others never notice."""

from __future__ import annotations

import itertools
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from apex.build import build_system
from apex.strategy import StrategyConfig
from swiftllm.config import EngineConfig
from swiftllm.core.request import SamplingParams, ServiceClass
from swiftllm.engine.engine import Engine
from swiftllm.sampling.grammar import GrammarDeadEnd
from swiftllm.server.client import ServiceStopping
from swiftllm.server.engine_loop import FaultIsolation
from swiftllm.server.messages import NewRequest
from tests.reference.fake_engine import fake_engine, flat_table
from tests.reference.faulty_backend import FaultyBackend
from tests.swiftllm.server.serving import Outcome, check_empty, expected, make_requests, read_all, serve, with_service

MADE_UP_PROFILE = flat_table(cpu_token_s=2e-6)  # decisions must not depend on how busy this machine is
CPU_SYSTEMS = ("neo", "fastdecode", "apex", "apex-overlap", "adaptive", "adaptive-overlap")
SYSTEMS = ("swiftllm", "vllm", *CPU_SYSTEMS)


def make_engine(system: str, *, num_gpu_blocks: int = 16, num_cpu_blocks: int = 60, seed: int = 0) -> Engine:
    strategy = StrategyConfig(strategy="asynchronous-overlap") if system.endswith("-overlap") else None
    return fake_engine(
        system.removesuffix("-overlap"),
        num_gpu_blocks=num_gpu_blocks,
        num_cpu_blocks=num_cpu_blocks,
        strategy=strategy,
        seed=seed,
    )


class Poison:
    """Every operation of one kind fails that has to do with one request."""

    def __init__(self, request_id: str, *operations: str) -> None:
        self.request_id = request_id
        self.operations = operations
        self.num_raised = 0

    def __call__(self, operation: str, request_ids: frozenset[str]) -> None:
        if operation in self.operations and self.request_id in request_ids:
            self.num_raised += 1
            raise ValueError(f"{operation} cannot digest {self.request_id}")


class Glitches:
    """Operations fail now and then, whatever they are about, but not soon again."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.num_raised = 0
        self._begin_rest()

    def _begin_rest(self) -> None:
        self.num_good = self.random.randint(100, 400)

    def __call__(self, operation: str, request_ids: frozenset[str]) -> None:
        self.num_good -= 1
        if self.num_good < 0:
            self.num_raised += 1
            self._begin_rest()
            raise OSError(f"{operation} failed for once")


def run(engine: Engine) -> None:
    for _ in range(5000):
        if not engine.has_unfinished():
            return
        engine.step()
    raise AssertionError(f"still running: {engine.status()}")


@pytest.mark.parametrize("system", SYSTEMS)
def test_an_engine_recovers_at_any_moment(system: str) -> None:
    """Recovering without need, after any number of steps, changes no token."""
    for num_steps in range(0, 40, 3):
        engine = make_engine(system)
        wanted = make_requests(8, seed=num_steps)
        requests = [
            engine.add(engine.make_request(new.request_id, new.prompt_token_ids, new.sampling)) for new in wanted
        ]
        for _ in range(num_steps):
            engine.step()
        aborted = requests[num_steps % 8]
        engine.abort(aborted.request_id)
        unfinished = engine.recover()
        check_empty(engine)
        assert unfinished == [request for request in requests if not request.is_finished]
        for request in unfinished:
            engine.add(request, check_targets=False)
        run(engine)
        check_empty(engine)
        for new, request in zip(wanted, requests, strict=True):
            if request is not aborted:
                assert request.output_token_ids == expected(new)


CASES = [(system, operation) for system in SYSTEMS for operation in ("open_gpu_batch", "gpu_attention", "run_stage")]
CASES += [(system, operation) for system in CPU_SYSTEMS for operation in ("open_cpu_batch", "submit", "attention")]


@pytest.mark.parametrize(("system", "operation"), CASES)
def test_a_poisoned_request_takes_no_other_down(system: str, operation: str) -> None:
    poison = Poison("r6", operation)
    engine = make_engine(system)
    FaultyBackend(engine, poison)
    requests = make_requests(8, seed=3)
    requests[6] = replace(requests[6], sampling=SamplingParams(max_tokens=30, ignore_eos=True))
    outcomes, service = serve(engine, requests)
    error = outcomes["r6"].error
    assert error is not None and error.reason == "engine_error"
    assert str(error) == f"ValueError: {operation} cannot digest r6"
    for new in requests:
        if new.request_id != "r6":
            assert outcomes[new.request_id].token_ids == expected(new)
    snapshot = service.snapshot()
    assert snapshot.finished["engine_error"] == 1
    assert snapshot.step_failures == poison.num_raised


@pytest.mark.parametrize("system", ["omniserve", "omniserve-stepping"])
def test_a_poisoned_best_effort_request_takes_no_other_down(system: str) -> None:
    """It fails in the CPU tier, where only best-effort requests may be: the harmless one that follows must be one."""
    poison = Poison("r6", "submit")
    engine = make_engine(system, num_gpu_blocks=8)
    FaultyBackend(engine, poison)
    requests = [replace(new, service_class=ServiceClass.BEST_EFFORT) for new in make_requests(8, seed=3)]
    requests[6] = replace(requests[6], sampling=SamplingParams(max_tokens=30, ignore_eos=True))
    outcomes, _ = serve(engine, requests)
    assert str(outcomes["r6"].error) == "ValueError: submit cannot digest r6"
    for new in requests:
        assert new.request_id == "r6" or outcomes[new.request_id].token_ids == expected(new)


@pytest.mark.parametrize("system", ["apex-overlap", "adaptive-overlap"])
def test_a_search_for_a_fault_in_the_cpu_tier_refuses_no_request_that_the_gpu_holds(system: str) -> None:
    engine, faults = make_engine(system, num_gpu_blocks=30, num_cpu_blocks=20), iter([OSError("no CPU batch opens")])

    def fault(operation: str, _: frozenset[str]) -> None:
        if operation == "open_cpu_batch" and (error := next(faults, None)) is not None:
            raise error

    FaultyBackend(engine, fault)
    for new in make_requests(24, seed=3):
        engine.add(engine.make_request(new.request_id, new.prompt_token_ids, new.sampling))
    isolation = FaultIsolation(engine)
    with pytest.raises(OSError, match="no CPU batch opens"):
        run(engine)
    assert isolation.step_failed() is None and isolation.is_under_way
    whole_tier = 30 * engine.kv.block_size
    request = engine.make_request("long", (1,) * (whole_tier - 10), SamplingParams(max_tokens=10))
    assert request.max_kv_tokens > 20 * engine.kv.block_size


@pytest.mark.parametrize("system", ["swiftllm", "neo", "apex"])
def test_a_request_that_cannot_be_swapped_takes_no_other_down(system: str) -> None:
    """Alone it need not be swapped, so it may well come through."""
    requests = make_requests(8, seed=3, longest=20)
    swapped: list[str] = []
    engine = make_engine(system, num_gpu_blocks=12)
    FaultyBackend(engine, lambda operation, ids: swapped.extend(ids) if operation == "swap" else None)
    serve(engine, requests)

    poison = Poison(swapped[0], "swap")
    engine = make_engine(system, num_gpu_blocks=12)
    FaultyBackend(engine, poison)
    outcomes, _ = serve(engine, requests)
    assert poison.num_raised
    for new in requests:
        if new.request_id != poison.request_id or outcomes[new.request_id].error is None:
            assert outcomes[new.request_id].token_ids == expected(new)


@pytest.mark.parametrize("system", SYSTEMS)
def test_two_poisoned_requests_are_both_found(system: str) -> None:
    engine = make_engine(system)
    first, second = Poison("r0", "run_stage"), Poison("r5", "run_stage")
    FaultyBackend(engine, lambda *operation: (first(*operation), second(*operation)))
    requests = make_requests(8, seed=4)
    for i in (0, 5):
        requests[i] = replace(requests[i], sampling=SamplingParams(max_tokens=30, ignore_eos=True))
    outcomes, _ = serve(engine, requests)
    for new in requests:
        outcome = outcomes[new.request_id]
        assert (outcome.error is not None) == (new.request_id in ("r0", "r5"))
        assert outcome.error or outcome.token_ids == expected(new)


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_request_that_the_error_names_is_blamed_at_once_during_a_search_too(system: str) -> None:
    engine = make_engine(system)
    named, unnamed = Poison("r0", "run_stage"), Poison("r5", "run_stage")

    def fault(operation: str, request_ids: frozenset[str]) -> None:
        try:
            named(operation, request_ids)
        except ValueError as error:
            dead_end = GrammarDeadEnd(str(error))
            dead_end.request_id = "r0"
            raise dead_end from None
        unnamed(operation, request_ids)

    FaultyBackend(engine, fault)
    outcomes, _ = serve(engine, requests := make_requests(8, seed=4))
    assert named.num_raised == 1 and unnamed.num_raised > 1
    assert (outcomes["r0"].error.reason, outcomes["r5"].error.reason) == ("invalid_grammar", "engine_error")
    for new in requests:
        assert outcomes[new.request_id].error or outcomes[new.request_id].token_ids == expected(new)


@pytest.mark.parametrize("system", SYSTEMS)
def test_faults_that_pass_blame_nobody(system: str) -> None:
    for seed in range(3):
        glitches = Glitches(seed)
        engine = make_engine(system, seed=seed)
        FaultyBackend(engine, glitches)
        requests = make_requests(12, seed=seed, logprobs=0)
        outcomes, service = serve(engine, requests)
        assert glitches.num_raised
        for new in requests:
            outcome = outcomes[new.request_id]
            assert outcome.error is None
            assert outcome.token_ids == expected(new)
            assert [logprob.token_id for logprob in outcome.logprobs] == outcome.token_ids
        assert service.snapshot().step_failures == glitches.num_raised


@pytest.mark.parametrize(("part", "method"), [("scheduler", "plan"), ("state", "apply")])
@pytest.mark.parametrize("system", ["swiftllm", "apex-overlap"])
def test_a_scheduler_that_raises_for_once_loses_nothing(system: str, part: str, method: str, monkeypatch) -> None:
    engine = make_engine(system)
    owner, calls = getattr(engine, part), iter(range(10**6))
    honest = getattr(owner, method)

    def faulty(*arguments):
        call = next(calls)
        if call % 25 == 12 and method == "plan":
            raise AssertionError("a defect")
        result = honest(*arguments)
        if call % 25 == 12:
            raise AssertionError("a defect, after the tokens were taken in")
        return result

    monkeypatch.setattr(owner, method, faulty)
    requests = make_requests(8, seed=5, logprobs=0)
    outcomes, service = serve(engine, requests)
    assert service.snapshot().step_failures
    for new in requests:
        assert outcomes[new.request_id].token_ids == expected(new)
        assert len(outcomes[new.request_id].logprobs) == len(expected(new))


@pytest.mark.parametrize("error", [RuntimeError("no device"), SystemExit(1)])
def test_an_engine_that_always_fails_tells_everyone(error: BaseException) -> None:
    engine = make_engine("apex")

    def fault(*_) -> None:
        raise error

    FaultyBackend(engine, fault)

    async def client(service) -> None:
        outcomes = await read_all(service.submit(make_requests(8)))
        assert {outcome.error.reason for outcome in outcomes.values()} == {"engine_error"}
        assert service.health.status == "failed"
        with pytest.raises(ServiceStopping, match="the engine has failed"):
            service.submit([NewRequest("late", (1,), make_requests(1)[0].sampling)])

    service = with_service(engine, client)
    assert service.snapshot().finished == {"engine_error": 8}


# -- with a model ---------------------------------------------------------------------------------------------------


def model_engine(model_dir: Path, system: str, num_gpu_blocks: int = 20) -> Engine:
    strategy = StrategyConfig(strategy="asynchronous-overlap") if system.endswith("-overlap") else None
    config = EngineConfig(
        str(model_dir), device="cpu", dtype="float32", block_size=4, num_gpu_blocks=num_gpu_blocks, num_cpu_blocks=400
    )
    engine = build_system(system.removesuffix("-overlap"), config, strategy, profile=MADE_UP_PROFILE)
    for pool in engine.backend.kv_pools.tensors.values():
        pool.fill_(float("nan"))
    return engine


MODEL_REQUESTS = [
    NewRequest(
        f"r{i}",
        tuple(range(3 + i, 13 + 2 * i)),
        SamplingParams(
            max_tokens=16,
            temperature=float(i % 2),
            frequency_penalty=0.5 * (i % 3),
            seed=i,
            logprobs=2,
            prompt_logprobs=0,
            ignore_eos=True,
        ),
    )
    for i in range(8)
]


@pytest.fixture(scope="module")
def undisturbed(tiny_model_dir) -> dict[str, Outcome]:
    outcomes, _ = serve(model_engine(tiny_model_dir(), "swiftllm", num_gpu_blocks=200), MODEL_REQUESTS)
    return outcomes


def same(outcome: Outcome, reference: Outcome) -> bool:
    """Equal tokens, greedy or drawn, and logprobs as equal as another batch makes them."""
    assert [logprob.token_id for logprob in outcome.logprobs] == outcome.token_ids
    found, expected = ([*each.prompt_logprobs, *each.logprobs] for each in (outcome, reference))
    assert [entry.logprob for entry in found] == pytest.approx([entry.logprob for entry in expected], abs=1e-4)
    return outcome.token_ids == reference.token_ids


@pytest.mark.parametrize("system", ["swiftllm", "neo", "apex", "apex-overlap", "adaptive-overlap"])
def test_a_model_goes_on_after_faults(tiny_model_dir, undisturbed, system: str) -> None:
    engine = model_engine(tiny_model_dir(), system)
    glitches = Glitches(seed=1)
    FaultyBackend(engine, glitches)
    outcomes, _ = serve(engine, MODEL_REQUESTS)
    assert glitches.num_raised
    assert all(same(outcomes[new.request_id], undisturbed[new.request_id]) for new in MODEL_REQUESTS)


@pytest.mark.parametrize("system", ["neo", "fastdecode", "apex-overlap", "adaptive-overlap"])
def test_a_dead_cpu_worker_is_started_again(tiny_model_dir, undisturbed, system: str, monkeypatch) -> None:
    """It dies in the middle of its 5th task, and from outside once more."""
    engine = model_engine(tiny_model_dir(), system)
    worker = engine.backend.cpu_tier.worker
    submit, numbers = worker.submit, itertools.count(1)

    def deadly(task, arrived, send_back=None):
        number = next(numbers)
        if number == 15:
            worker.kill()
        return submit(task, arrived, sys.exit if number == 5 else send_back)

    monkeypatch.setattr(worker, "submit", deadly)
    outcomes, service = serve(engine, MODEL_REQUESTS)
    assert service.snapshot().worker_restarts == 2
    assert service.snapshot().step_failures >= 2
    assert all(same(outcomes[new.request_id], undisturbed[new.request_id]) for new in MODEL_REQUESTS)
