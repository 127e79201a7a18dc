"""Profiles of models with attention windows in half of their layers: what is timed is the work of the layer that is
timed, and that of a model without windows where no context is longer than the window.

The right values are counted from the windows alone: a row attends to the last ``window`` tokens, as in transformers'
masks, and a context in host memory is gathered from the block in which they begin.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config, SmolLM3Config

from apex.perf import profiler
from apex.perf.machine_profile import make_workbench
from apex.perf.profiler import SizeGrid, TimedOperation, Workbench, measure_seconds, table_from_seconds
from swiftllm.config import EngineConfig
from swiftllm.core.request import Tier
from swiftllm.runtime.cpu_tier import AttentionTask, ContextRead
from swiftllm.runtime.torch_backend import TorchBackend, open_torch_backend
from tests.reference.tiny_gpt_oss import make_tiny_gpt_oss
from tests.reference.tiny_model import make_tiny_llama

LAYERS = 4
ALTERNATING = ["sliding_attention", "full_attention"] * 2
SMOLLM3 = {"kind": SmolLM3Config, "pad_token_id": None, "no_rope_layers": [1, 1, 1, 0]}
MODELS: dict[str, dict[str, Any]] = {
    "gpt-oss": {},
    "SmolLM3": {**SMOLLM3, "use_sliding_window": True, "layer_types": ALTERNATING},
    "Qwen2, in halves": {"kind": Qwen2Config, "use_sliding_window": True, "max_window_layers": 2},
}
PREFILLS = ((3, 1), (3, 12), (8, 100), (3, 300))
"""(new tokens, cached before): within all windows, and beyond one after the other."""
DECODES = ((2, 4), (2, 16), (2, 120), (2, 400))
SMALL = SizeGrid(
    linear_tokens=(1, 4), sampled_rows=(1, 2), swapped_blocks=(1, 2), prefill_tokens=(1, 3), prefill_cached=(0, 1, 300),
    decode_requests=(1, 2), decode_contexts=(4, 400), prefill_chunks_counts=(2,), iteration_requests=(1, 2),
)  # fmt: skip


def make_model(folder: Path, name: str, window: int | None) -> Path:
    """The model with a window in half of its layers; None: in none of them."""
    size = {"num_hidden_layers": LAYERS, "sliding_window": window}
    if name == "gpt-oss":
        types = {} if window else {"layer_types": ["full_attention"] * LAYERS}
        return make_tiny_gpt_oss(folder, **size, **types, max_position_embeddings=512)
    fields = dict(MODELS[name])
    if window is None:
        fields = {**fields, "use_sliding_window": False, "layer_types": ["full_attention"] * LAYERS}
    return make_tiny_llama(folder, **fields, **size)


def open_backend(folder: Path, dtype: str) -> tuple[TorchBackend, Workbench]:
    sizes = {"num_gpu_blocks": 200, "num_cpu_blocks": 400, "max_num_batched_tokens": 64, "max_model_len": 512}
    config = EngineConfig(str(folder), device="cpu", dtype=dtype, **sizes)
    backend = open_torch_backend(config)
    return backend, make_workbench(config, backend)


class TimedWork:
    """Counts what a backend does while something is timed, by the layer for which it is done."""

    def __init__(self, backend: TorchBackend, bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
        self.backend, self.done, self.layer, self.is_timed = backend, Counter(), -1, False
        runner, ops = backend._local_tier.runner, backend._ops
        attend, submit, run_task, time_s = (
            backend.gpu_attention, backend.submit_cpu_attention, runner.run_task, bench._time_s
        )  # fmt: skip
        prefill, decode = ops.prefill_attention, ops.decode_attention

        def at(call):
            def run(layer, batch):
                self.layer = layer
                return call(layer, batch)

            return run

        def timed(run):
            self.is_timed = True
            try:
                return time_s(run)
            finally:
                self.is_timed = False

        def note_prefill(q, k, v, lens, *more):
            for rows, tokens in zip(lens.rows, lens.tokens, strict=True):
                self.note("attends", rows=rows, tokens=tokens)
            prefill(q, k, v, lens, *more)

        def note_decode(q, k, v, kv_layer, tables, lens, out, scale, window, sinks):
            self.note("decodes", rows=len(lens), tokens=within(window, int(lens.sum()) // len(lens)))
            decode(q, k, v, kv_layer, tables, lens, out, scale, window, sinks)

        def note_task(task):
            if isinstance(task, ContextRead):
                self.note("gathers the next", tokens=task.out.shape[2], bytes=task.out.nbytes)
            elif isinstance(task, AttentionTask):
                lens = task.rows.seq_lens
                mean = int(lens.sum()) // len(lens)
                self.note("decodes on CPU", True, rows=len(lens), tokens=within(task.rows.window, mean))
            run_task(task)

        monkeypatch.setattr(backend, "gpu_attention", at(attend))
        monkeypatch.setattr(backend, "submit_cpu_attention", at(submit))
        monkeypatch.setattr(runner, "run_task", note_task)
        monkeypatch.setattr(bench, "_time_s", timed)
        monkeypatch.setattr(ops, "prefill_attention", note_prefill)
        monkeypatch.setattr(ops, "decode_attention", note_decode)

    def note(self, what: str, is_timed: bool = False, **sizes: int) -> None:
        if self.is_timed or is_timed:
            self.done[what, self.layer, *sizes.values()] += 1

    def of(self, operation: TimedOperation, samples: int) -> Counter:
        self.done.clear()
        for _ in range(samples):
            operation()
        return self.done.copy()


def within(window: int | None, tokens: int) -> int:
    return tokens if window is None else min(window, tokens)


def all_work(folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> tuple[TorchBackend, dict[Any, Counter]]:
    """The work that is timed for each size, twice over all layers."""
    backend, bench = open_backend(folder, dtype)
    work, twice = TimedWork(backend, bench, monkeypatch), 2 * LAYERS // 2
    with bench.in_use():
        done = {("prefill", *size): work.of(bench.prefill_attention([size], Tier.CPU), twice) for size in PREFILLS}
        done |= {("decode", *size): work.of(bench.gpu_attention(*size), twice) for size in DECODES}
        # A sample is of one layer in each group, and of one more: all layers come equally often.
        growth = backend.layer_groups.growth
        done |= {("CPU", *size): work.of(bench.cpu_attention(*size), (growth + 1) * LAYERS) for size in DECODES}
    backend.close()
    return backend, done


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [5, 16, 128])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_timed_is_the_work_of_each_layer(tmp_path: Path, monkeypatch, name: str, window: int, dtype) -> None:
    backend, done = all_work(make_model(tmp_path / "windows", name, window), dtype, monkeypatch)
    windows, size = backend.layer_groups.layer_windows, backend.block_size
    assert Counter(windows) == {window: LAYERS // 2, None: LAYERS // 2}

    def earlier(layer: int, cached: int) -> int:
        """Tokens gathered before a chunk that begins at ``cached``."""
        return cached - (0 if windows[layer] is None else max(0, cached - window + 1) // size * size)

    heads = 2 * backend.model_config.num_kv_heads * backend.model_config.head_dim * backend.dtype.itemsize
    for new, cached in PREFILLS:
        expected = Counter({("attends", n, new, earlier(n, cached) + new): 2 for n in range(LAYERS)})
        gathered = {n: earlier(n + 1, cached) for n in range(LAYERS - 1)}
        expected += Counter({("gathers the next", n, tokens, tokens * heads): 2 for n, tokens in gathered.items()})
        assert done["prefill", new, cached] == expected
    for requests, context in DECODES:
        tokens = [within(windows[n], context) for n in range(LAYERS)]
        assert done["decode", requests, context] == {("decodes", n, requests, tokens[n]): 2 for n in range(LAYERS)}
        on_cpu = done["CPU", requests, context]
        assert on_cpu == {("decodes on CPU", n, requests, tokens[n]): 9 for n in range(LAYERS)}

    _, plain = all_work(make_model(tmp_path / "plain", name, None), dtype, monkeypatch)
    context = {key: key[1] + key[2] if key[0] == "prefill" else key[2] for key in done}
    short = [key for key in done if context[key] <= window]
    assert len(short) >= 3
    for key in short:
        if key[0] == "CPU":  # fewer layers a sample
            assert done[key].keys() == plain[key].keys() and len(set(plain[key].values())) == 1
        else:
            assert done[key] == plain[key]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [1, 5, 16, 128])
@pytest.mark.parametrize("name", MODELS)
def test_a_profile_is_measured(tmp_path: Path, monkeypatch, name: str, window: int, dtype: str) -> None:
    monkeypatch.setattr(profiler, "ROUNDS", 3)
    backend, bench = open_backend(make_model(tmp_path, name, window), dtype)
    (seconds,) = measure_seconds(bench, 64, SMALL)
    table = table_from_seconds(seconds, {})
    for surface in (table.prefill_attention, table.gpu_attention, table.cpu_attention):
        assert all(value > 0 for curve in surface.curves for value in curve.seconds)
    backend.close()
