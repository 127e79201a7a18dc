"""A scheduler of one's own: every CPU request that is ready rides the lane, which waits for it.

.venv/bin/python examples/custom_scheduler.py

simulates it beside the papers' schedulers. Named in APEX_PLUGINS, it works in every command:

APEX_PLUGINS=custom_scheduler PYTHONPATH=examples .venv/bin/apex serve MODEL --system ride-along
"""

import sys

from apex.perf.lane_load import LaneLoad
from apex.schedulers import register_scheduler
from apex.schedulers.cpu_decodes import CpuDecodes
from apex.schedulers.hybrid import Predicting, gpu_only, pipelined
from apex.schedulers.pipeline import Pipeline
from swiftllm.scheduling.draft import Draft
from swiftllm.scheduling.parts import two_tiers


class RideAlong(Predicting):
    """One batch, which takes turns with nothing: the lane waits whenever the CPU is slower."""

    def plan(self, residents):
        draft = Draft(residents)
        ready = CpuDecodes(two_tiers(draft))  # fills the lane, GPU first; these CPU decodes may start a token
        load = LaneLoad.from_draft(draft)  # what the lane computes: prompt chunks and GPU decodes
        if not ready:
            return gpu_only(draft, self.model, load)
        pipeline = Pipeline(self.model, load)  # predicts the iteration's time from the profile
        pipeline.batches[0].add_requests(ready.requests, ready.context_tokens)
        return pipelined(draft, pipeline)


register_scheduler("ride-along", "all CPU decodes ride the lane", RideAlong)

if __name__ == "__main__":
    from apex.cli import main  # imported last: the options of its commands name the systems that there are

    sizes = ["--num-requests", "60", "--input-len", "300", "--output-len", "30", "--num-gpu-blocks", "400"]
    sys.exit(main(["simulate", "--system", "swiftllm", "neo", "ride-along", *sizes]))
