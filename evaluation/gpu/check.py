"""One system end to end on this machine's GPU, in a paper's setting: a part of scripts/gpu_check.sh.

python -m evaluation.gpu.check --system apex --case llama-2-7b --folder FOLDER

Needs torch, numpy, Triton and pacpu alone, since a machine with a GPU may have no network; matplotlib draws a timeline
where it is there. Weights are random: times and counts are what is of interest. The profile table measured on the spot
also drives the simulator through the same run, and what it says stands beside what was measured.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    NEEDS = ("numpy", "pacpu", "torch")
    from evaluation import here

from apex.perf.model import ProfileTable
from apex.replay.loop import check_requests, replay_requests
from apex.replay.metrics import compute_metrics
from apex.replay.records import ReplayRequest
from apex.source_tree import CONFIGS
from evaluation.gpu.report import SYSTEMS
from swiftllm.config import EngineConfig
from swiftllm.core.request import Tier
from swiftllm.files import check_writable, save_result
from swiftllm.machine import InsufficientMemory, host_memory_bytes, usable_cores

if TYPE_CHECKING:
    from swiftllm.engine.engine import Engine

WARM_UP_REQUESTS, WARM_UP_TOKENS = 4, 8
TIMELINE_ITERATIONS = 3
STALL_TIMEOUT_S = 600.0  # the first steps may compile kernels for minutes; a stage has a limit of its own
PRINT_EVERY_S = 5.0
# Of the time that is left when it begins, each may take so much; a measurement more where no timeline is to follow.
# What is simulated takes well below a second.
WARM_UP_SHARE, MEASURED_SHARE, MEASURED_ALONE_SHARE, TIMELINE_SHARE = 0.2, 0.7, 0.95, 0.8
END_S = 5.0  # a process that gives gigabytes back takes a moment


@dataclass(frozen=True)
class Case:
    """A model's shape, the GPU blocks of a paper's machine, and equal requests that are all there at once. The CPU
    blocks hold all of them, or what a machine with little memory has room for: the system clears every one."""

    model: str
    """Folder of config.json below configs/models; empty: a tiny shape, which only rehearses."""
    num_gpu_blocks: int
    num_cpu_blocks: int
    num_requests: int
    input_len: int
    output_len: int
    max_model_len: int
    origin: str
    device: str = "cuda"
    dtype: str = "float16"


CASES = {
    "llama-2-7b": Case("llama-2-7b", 54, 640, 64, 64, 96, 832, "54 GPU blocks: NEO's artifact for the T4"),
    "llama-3.1-8b": Case("llama-3.1-8b", 1650, 4544, 64, 1000, 128, 4096, "1,650 GPU blocks: NEO's for the A10"),
    "rehearsal": Case("", 12, 300, 12, 24, 12, 512, "a tiny model: shows that this works, no more", "cpu", "float32"),
}
REHEARSAL_MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "eos_token_id": 2,
}  # fmt: skip


@contextmanager
def model_folder(case: Case) -> Iterator[Path]:
    if case.model:
        yield CONFIGS / "models" / case.model
        return
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(REHEARSAL_MODEL))
        yield Path(folder)


def run_case(system: str, case: Case, folder: Path, limit_s: float) -> Iterator[dict[str, Any]]:
    """Measure one system, record a timeline where the CPU takes part, simulate the same.

    Yields the record after each of these, so that a later failure loses nothing. All of it has ``limit_s``; a
    measurement that this cuts short is recorded as it stands, and its simulated twin ends at the same second. Parts
    that fail after the measurement are listed in ``failed``.
    """
    end_s = time.monotonic() + limit_s
    import torch

    from apex.build import build_system
    from apex.perf.machine_profile import profile_identity, profile_path

    def part_of_rest_s(share: float) -> float:
        return share * (end_s - time.monotonic())

    def attempt(what: str, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception:
            traceback.print_exc()
            record["failed"].append(what)
            return None

    with model_folder(case) as model:
        case = replace(case, num_cpu_blocks=min(case.num_cpu_blocks, most_cpu_blocks(model)))
        pools = {"num_gpu_blocks": case.num_gpu_blocks, "num_cpu_blocks": case.num_cpu_blocks}
        limits = {"max_num_batched_tokens": case.max_model_len, "max_model_len": case.max_model_len}
        config = EngineConfig(str(model), case.device, case.dtype, "dummy", gpu_batch_threads=1, **pools, **limits)
        with closing(build_system(system, config)) as engine:
            # What a system with a CPU worker has measured: a GPU-only one has none to measure with.
            identity = profile_identity(config, engine.backend)
            profile = profile_path(identity)
            table = ProfileTable.load(profile, identity) if profile.exists() else None
            # As after an hour of serving: the system clears a page at its first write.
            with ThreadPoolExecutor(usable_cores()) as pool:
                list(pool.map(torch.Tensor.zero_, engine.backend.kv_pools.layers[Tier.CPU]))
            warm_up = replace(case, num_requests=WARM_UP_REQUESTS, output_len=min(case.output_len, WARM_UP_TOKENS))
            replay_case(engine, warm_up, "warm-up", part_of_rest_s(WARM_UP_SHARE))
            share = MEASURED_ALONE_SHARE if system == "swiftllm" else MEASURED_SHARE
            measured = replay_case(engine, case, "measured", part_of_rest_s(share))
            description, num_layers = engine.describe(), engine.backend.num_layers
            record = {"system": system, "case": asdict(case)}
            record |= {name: description[name] for name in ("device", "dtype", "cpu_kernel", "cpu_threads")}
            record |= {"measured": measured, "simulated": None, "simulated_error": None, "timeline": None, "failed": []}
            record["profile"] = table and asdict(table)
            yield record
            if system != "swiftllm":
                timeline_s = part_of_rest_s(TIMELINE_SHARE)
                record["timeline"] = attempt("timeline", lambda: trace(engine, case, folder, timeline_s))
                yield record
    if measured["output_tokens"] and table is not None:
        virtual_s = math.inf if measured["completed"] else measured["seconds"]
        simulated = attempt("simulation", lambda: simulate(system, case, table, num_layers, config, virtual_s))
        if simulated:
            record["simulated"] = simulated
            record["simulated_error"] = simulated["output_tokens_per_s"] / measured["output_tokens_per_s"] - 1.0
        yield record


def most_cpu_blocks(model: Path) -> int:
    """Blocks of 16-bit values that half of this machine's memory holds."""
    from swiftllm.model.config import ModelConfig  # loads torch

    return host_memory_bytes() // 2 // (ModelConfig.from_folder(model).kv_bytes_per_token(2) * EngineConfig.block_size)


def replay_case(engine: Engine, case: Case, name: str, limit_s: float) -> dict[str, Any]:
    """Send the requests all at once and step until they are done, or for ``limit_s`` of the engine's clock."""
    draw = random.Random(0)
    prompts = [tuple(draw.randrange(3, 500) for _ in range(case.input_len)) for _ in range(case.num_requests)]
    requests = [ReplayRequest(f"{name}-{index}", 0.0, prompt, case.output_len) for index, prompt in enumerate(prompts)]
    check_requests(engine, requests[:1])  # all are of one size
    printed_s = time.monotonic()

    def show(tokens: int) -> None:
        nonlocal printed_s
        if time.monotonic() - printed_s > PRINT_EVERY_S:
            printed_s = time.monotonic()
            print(f"  {name}: {tokens} tokens", flush=True)

    done = replay_requests(engine, requests, show, limit_s=limit_s, stall_timeout_s=STALL_TIMEOUT_S)
    metrics = compute_metrics(done.records, done.wall_s, done.stats)
    completed, output_tokens = metrics["completed"] == case.num_requests, done.stats["output_tokens"]
    return {
        "completed": completed,
        "seconds": done.wall_s,
        "output_tokens": output_tokens,
        # Of a run that the limit cuts short, the tokens so far: few of its requests, or none, are complete.
        "output_tokens_per_s": metrics["output_tokens_per_s"] if completed else output_tokens / done.wall_s,
        **{name: metrics[name] for name in ("gpu_batch_busy_fraction", "cpu_busy_fraction")},
        "strategy_iterations": done.stats["strategy_iterations"],
    }


def trace(engine: Engine, case: Case, folder: Path, limit_s: float) -> str | None:
    """The name of a picture of some iterations, None where none of them moved CPU requests. Requests that fill the GPU
    tier one and a half times are enough for that."""
    from apex.timeline.recorder import recording, write_timeline

    output_len = max(4, case.output_len // 4)
    fitting = case.num_gpu_blocks * engine.kv.block_size // (case.input_len + output_len)
    shorter = replace(case, num_requests=min(case.num_requests, fitting * 3 // 2), output_len=output_len)
    start_tokens, total = engine.stats().output_tokens, shorter.num_requests * output_len

    def progress() -> float:
        return min(1.0, (engine.stats().output_tokens - start_tokens) / total)

    about, case_name = engine.describe(), case.model or "rehearsal"
    with recording(engine, num_iterations=TIMELINE_ITERATIONS, start=None, progress=progress) as recorder:
        replay_case(engine, shorter, "timeline", limit_s)
    target = folder / f"{about['system']}-{case_name}-timeline.png"
    try:
        setting = f"{case_name} on {about['device']}; times are the host's"
        write_timeline(recorder.timeline(about["system"], setting, simulated=False), target)
    except (ValueError, ImportError) as error:
        print(f"  no timeline: {error}")
        return None
    target.with_suffix(".json").unlink()  # megabytes; `apex bench --trace-timeline` writes it where it is wanted
    return target.name


def simulate(
    system: str, case: Case, table: ProfileTable, num_layers: int, config: EngineConfig, limit_s: float
) -> dict[str, Any]:
    from apex.simulator.build import build_simulated

    pools = {"num_gpu_blocks": case.num_gpu_blocks, "num_cpu_blocks": case.num_cpu_blocks}
    limits = {name: getattr(config, name) for name in ("block_size", "max_num_batched_tokens", "max_num_seqs")}
    engine = build_simulated(system, table, num_layers, max_model_len=case.max_model_len, **pools, **limits)
    return replay_case(engine, case, "simulated", limit_s)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", choices=SYSTEMS, required=True, help="what schedules")
    parser.add_argument("--case", choices=CASES, required=True, help="model, pools and requests")
    parser.add_argument("--limit", type=float, default=75.0, help="seconds that all of it has; default %(default)g")
    parser.add_argument("--folder", type=Path, required=True, help="the run's record goes here")
    options = parser.parse_args(arguments)
    check_writable(options.folder)
    name = f"{options.system}-{options.case}"
    print(f"{name}: {CASES[options.case].origin}", flush=True)

    def save(record: dict[str, Any]) -> None:
        save_result(options.folder / f"{name}.json", json.dumps(record, indent=1) + "\n")

    try:
        for record in run_case(options.system, CASES[options.case], options.folder, options.limit - END_S):
            save(record)
    except InsufficientMemory as error:
        save({"system": options.system, "case": asdict(CASES[options.case]), "skipped": str(error)})
        print(f"  skipped: {error}")
        return 0
    measured, error = record["measured"], record["simulated_error"]
    line = f"  {measured['output_tokens_per_s']:.0f} tokens/s" + ("" if measured["completed"] else ", cut short")
    print(line + ("" if error is None else f"; SIMULATED {error:+.1%}"), flush=True)
    return 1 if record["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
