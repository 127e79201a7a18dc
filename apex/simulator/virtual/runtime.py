"""What the process around a scheduler does in a simulation: this project's engine, or vLLM."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

from swiftllm.scheduling.rules import SchedulingRules


@dataclass(frozen=True)
class Runtime:
    """How iterations run. The defaults are those of this project's engine, and of the papers' baselines.

    Attributes:
        all_rows_to_end: all tokens cross the last layer. Else only those whose row is sampled.
        host_beside_gpu: the host works while the GPU does, so that an iteration takes the longer of the two. Else the
            GPU waits for the host.
        graph_sizes: batches of fewer tokens than the largest are computed with as many as the next of these.
        plans_ahead, whole_prompts: see :class:`swiftllm.scheduling.rules.SchedulingRules`; of `vllm` alone.
        null_blocks: blocks of the GPU pool that no request gets.
    """

    all_rows_to_end: bool = False
    host_beside_gpu: bool = False
    graph_sizes: tuple[int, ...] = ()
    plans_ahead: bool = False
    whole_prompts: bool = False
    null_blocks: int = 0

    def padded(self, tokens: int) -> int:
        """Tokens that are computed for a batch of ``tokens``."""
        sizes = self.graph_sizes
        return sizes[bisect_left(sizes, tokens)] if sizes and 0 < tokens <= sizes[-1] else tokens

    def rules(self, rules: SchedulingRules) -> SchedulingRules:
        """The rules of `vllm` in this runtime."""
        return replace(rules, plans_ahead=self.plans_ahead, whole_prompts=self.whole_prompts)


OWN_ENGINE = Runtime()
VLLM = "vllm"
VLLM_DEFAULTS = "vLLM 0.19 with its defaults: prefix cache, asynchronous scheduling, graphs, whole prompts reserved"
PAPERS_VLLM = "as the papers ran it, without prefix cache, asynchronous scheduling and reservation"


def vllm_runtime(max_num_seqs: int) -> Runtime:
    """vLLM 0.19 with its defaults: asynchronous scheduling, CUDA graphs, reservation of whole prompts, a null block."""
    return Runtime(
        all_rows_to_end=True,
        host_beside_gpu=True,
        graph_sizes=graph_sizes(max_num_seqs),
        plans_ahead=True,
        whole_prompts=True,
        null_blocks=1,
    )


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """The batch sizes that vLLM captures by default: up to twice ``max_num_seqs`` and 512 at most."""
    largest = min(2 * max_num_seqs, 512)
    sizes = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
    return tuple(size for size in sizes if size <= largest)
