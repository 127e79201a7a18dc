"""A scheduler of one's own: every CPU request that is ready joins the GPU batch, which waits for it.

.venv/bin/python examples/custom_scheduler.py

simulates it beside the papers' schedulers. Named in APEX_PLUGINS, it works in every command:

APEX_PLUGINS=custom_scheduler PYTHONPATH=examples .venv/bin/apex serve MODEL --system join-all
"""

import sys

from apex.perf.model import GpuBatchLoad
from apex.schedulers.hybrid import CpuDecodes, Pipeline, Predicting, gpu_only, pipelined
from apex.systems import register_scheduler
from swiftllm.scheduling.scheduler import PlanBuilder, two_tiers


class JoinAll(Predicting):
    """One batch, which takes turns with nothing: the GPU batch waits whenever the CPU is slower."""

    def plan(self, state):
        builder = PlanBuilder(state)
        ready = CpuDecodes(two_tiers(builder))  # fills the GPU batch, GPU first; these CPU decodes may start a token
        load = GpuBatchLoad.from_builder(builder)  # what the GPU batch computes: prompt chunks and GPU decodes
        if not ready:
            return gpu_only(builder, self.model, load)
        pipeline = Pipeline(self.model, load)  # predicts the iteration's time from the profile
        pipeline.batches[0].add_requests(ready.requests, ready.context_tokens)
        return pipelined(builder, pipeline)


register_scheduler("join-all", "all CPU decodes join the GPU batch", JoinAll)

if __name__ == "__main__":
    from apex.cli import main  # imported last: the options of its commands name the systems that there are

    sizes = ["--num-requests", "60", "--input-len", "300", "--output-len", "30", "--num-gpu-blocks", "400"]
    sys.exit(main(["simulate", "--system", "swiftllm", "neo", "join-all", *sizes]))
