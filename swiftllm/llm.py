"""The offline API: prompts in, texts out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from swiftllm.config import EngineConfig
from swiftllm.request import Request, RequestOutput, SamplingParams
from swiftllm.systems import build_engine

Prompt = str | Sequence[int]


class LLM:
    """A model under a scheduler.

    Args:
        model: Hugging Face folder of a Llama-family model.
        scheduler: "swiftllm" (GPU only), "neo", "fastdecode" or "apex".
        options: fields of :class:`swiftllm.config.EngineConfig`, such as ``device``, ``dtype``, ``num_gpu_blocks``.
    """

    def __init__(self, model: str, scheduler: str = "swiftllm", **options: Any) -> None:
        self.engine = build_engine(scheduler, EngineConfig(model=str(model), **options))
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete the prompts (texts, or lists of token ids) and return their outputs in the same order.

        Raises:
            RequestRefused: one of the prompts can never be served; none of them has been started then.
            ValueError: the numbers of prompts and sampling parameters differ, or a text comes without a tokenizer.
        """
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(sampling_params)} sampling parameters")
        requests = self._add_all(prompts, sampling_params)
        final: dict[str, RequestOutput] = {}
        while len(final) < len(requests):
            final.update({output.request_id: output for output in self.engine.step() if output.finished})
        return [self._with_text(final[request.request_id]) for request in requests]

    def _add_all(self, prompts: Sequence[Prompt], sampling: Sequence[SamplingParams]) -> list[Request]:
        requests: list[Request] = []
        try:
            for prompt, params in zip(prompts, sampling, strict=True):
                token_ids = self._encode(prompt) if isinstance(prompt, str) else prompt
                requests.append(self.engine.add_request(f"generate-{next(self._ids)}", token_ids, params))
        except ValueError:
            for request in requests:
                self.engine.abort(request.request_id)
            self.engine.step()
            raise
        return requests

    def _encode(self, text: str) -> list[int]:
        if self.engine.tokenizer is None:
            raise ValueError("the model folder has no tokenizer: give prompts as lists of token ids")
        return self.engine.tokenizer.encode(text)

    def _with_text(self, output: RequestOutput) -> RequestOutput:
        tokenizer = self.engine.tokenizer
        return output if tokenizer is None else replace(output, text=tokenizer.decode(list(output.token_ids)))

    def close(self) -> None:
        self.engine.close()
