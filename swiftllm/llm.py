"""The offline API: prompts in, texts out."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from numbers import Integral
from pathlib import Path
from typing import Any, Self

from swiftllm.build import build_engine
from swiftllm.config import EngineConfig
from swiftllm.core.request import RequestOutput, SamplingParams, ServiceClass
from swiftllm.model.folder import model_folder

Prompt = str | Sequence[int]


class LLM:
    """A model and the system that serves it, closed by :meth:`close`, after a ``with``, or when nothing refers to it.

    Threads may share it: one call of :meth:`generate` runs at a time.

    Args:
        model: Hugging Face folder of a Llama-family model, or a name on the hub such as "meta-llama/Llama-3.1-8B".
        system: a name of :func:`swiftllm.systems.systems`, such as "vllm", "swiftllm", "neo", "apex", "omniserve".
        options: fields of :class:`swiftllm.config.EngineConfig`, such as ``device``, ``dtype``, ``num_gpu_blocks``, and
            of the system's strategy, such as ``tpot_slo_s``.

    Raises:
        ValueError: no such system, or an option is out of its range.
        TypeError: there is no such option.
    """

    def __init__(self, model: str | Path, system: str = "swiftllm", **options: Any) -> None:
        of_engine = {field.name for field in fields(EngineConfig)}
        config = EngineConfig(str(model), **{name: value for name, value in options.items() if name in of_engine})
        strategy = {name: value for name, value in options.items() if name not in of_engine}
        folder = model_folder(model, weights=config.load_format == "auto")
        self.engine = build_engine(system, replace(config, model=str(folder)), strategy)
        self._ids = itertools.count()
        self._lock = threading.Lock()
        # The worker's thread refers to the CPU tier: without this an LLM that is dropped would keep that memory.
        self._close_engine = weakref.finalize(self, self.engine.close)

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        service_class: ServiceClass | str | Sequence[ServiceClass | str] = ServiceClass.LATENCY_SENSITIVE,
    ) -> list[RequestOutput]:
        """Complete the prompts (texts, or lists of token ids) and return their outputs in the same order.

        All of them queue, whatever the targets of the system: nobody could try again later.
        ``service_class`` is "latency-sensitive" or "best-effort": for all prompts, or a list with one for each.

        Raises:
            RequestRefused: one of the prompts can never be served; then none of them has been started.
            ValueError: there are more or fewer sampling parameters or classes than prompts, a class is unknown, or a
                text comes without a tokenizer.
            TypeError: the prompts are neither texts nor lists of token ids, or the parameters no SamplingParams.
            RuntimeError: the LLM is closed.
        """
        prompts = _list_of_prompts(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(prompts)
        if not all(isinstance(params, SamplingParams) for params in sampling_params):
            raise TypeError("sampling_params must be SamplingParams, or a list with one for each prompt")
        if isinstance(service_class, (str, ServiceClass)):
            service_class = [service_class] * len(prompts)
        for what, given in (("sampling parameters", sampling_params), ("service classes", service_class)):
            if len(given) != len(prompts):
                raise ValueError(f"{len(prompts)} prompts but {len(given)} {what}")
        classes = [ServiceClass(name) for name in service_class]
        with self._lock:
            if not self._close_engine.alive:
                raise RuntimeError("this LLM is closed: make another")
            return self._run(prompts, sampling_params, classes)

    def _run(
        self, prompts: Sequence[Prompt], sampling_params: Sequence[SamplingParams], classes: Sequence[ServiceClass]
    ) -> list[RequestOutput]:
        final: dict[str, RequestOutput | None] = {}
        try:
            for prompt, params, of_class in zip(prompts, sampling_params, classes, strict=True):
                token_ids = self._encode(prompt) if isinstance(prompt, str) else prompt
                request_id = f"generate-{next(self._ids)}"
                request = self.engine.make_request(request_id, token_ids, params, service_class=of_class)
                self.engine.add(request, check_targets=False)
                final[request_id] = None
            while None in final.values():
                final.update({o.request_id: o for o in self.engine.step() if o.finished and o.request_id in final})
        except BaseException:  # a refusal or an interrupt: leave no request running
            for request_id, output in final.items():
                if output is None:
                    self.engine.abort(request_id)
            raise
        return [self._with_text(output) for output in final.values() if output is not None]

    def _encode(self, text: str) -> list[int]:
        if self.engine.tokenizer is None:
            raise ValueError("the model folder has no tokenizer: give prompts as lists of token ids")
        return self.engine.tokenizer.encode(text)

    def _with_text(self, output: RequestOutput) -> RequestOutput:
        tokenizer = self.engine.tokenizer
        return output if tokenizer is None else output._replace(text=tokenizer.decode(list(output.token_ids)))

    def close(self) -> None:
        """Close the engine and end its threads, once a call of :meth:`generate` under way has ended."""
        with self._lock:
            self._close_engine()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _list_of_prompts(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """The prompts, each a text or a list of token ids; one alone need not be in a list."""
    if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts must be a text, a list of texts or lists of token ids, not {type(prompts).__name__}")
    several: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
    if several and isinstance(several[0], Integral):
        return [several]
    for prompt in several:
        if isinstance(prompt, Mapping) or not isinstance(prompt, Iterable):
            raise TypeError(f"a prompt must be a text or a list of token ids, not {type(prompt).__name__}")
    return several
