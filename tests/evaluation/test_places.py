"""Axes and places: what a value changes in a setting or a task."""

from __future__ import annotations

import pytest

from apex.simulator.backend import VLLM
from apex.simulator.hardware_files import LayerShape, load_host
from apex.simulator.paper_settings import load_setting
from apex.simulator.predicted_profile import cpu_attention_gb_s
from evaluation.grid import FIELDS, SETTING, TASK, Grid, concerns, lengths_of, setting_of, simulate, simulated_point
from swiftllm.core.request import Tier

PLACE = {"setting": "apex-a10", "system": "apex", "input_len": 1000, "output_len": 50, "num_requests": 4}


def test_requests_are_at_once_or_poisson_and_systems_share_them():
    lengths = lengths_of(PLACE)
    assert lengths.spec.arrivals == "at-once" and {row.arrival_s for row in lengths.rows} == {0.0}
    assert lengths_of({**PLACE, "system": "neo"}) is lengths
    later = lengths_of({**PLACE, "request_rate": 2.0, "seed": 0})
    assert later.spec.arrivals == "poisson" and later.rows[-1].arrival_s > 0
    assert [row.output_tokens for row in later.rows] == [row.output_tokens for row in lengths.rows]
    assert lengths_of({**PLACE, "seed": 1}).rows != lengths.rows
    assert lengths_of({"workload": "osc", "num_requests": 3, "output_len": 80}).spec.name == "osc"


def test_the_row_of_a_task_has_the_fields_that_are_asked_for():
    task = simulate({**PLACE, "panel": "b"}, ["panel", "load"], share=2)
    assert task.values["panel"] == "b" and task.values["load"] is None and task.values["share"] == 2
    assert "num_requests" not in task.values and task.values["setting"] == "apex-a10"
    point = simulated_point(["a", "b"], task)
    assert (point.key, point.label, point.cost) == ("a-b-apex", "a, b, apex", float(task.lengths.total_output_tokens))


CHANGES = {
    "gpu": ("rtx-4090", lambda new, old: new.gpu == "rtx-4090" and new.num_gpu_blocks == old.num_gpu_blocks),
    "max_num_batched_tokens": (512, lambda new, old: new.limits.max_num_batched_tokens == 512),
    "host": ("g5-2xlarge", lambda new, old: new.host == "g5-2xlarge" and new["cpu_kv_gb"] < old["cpu_kv_gb"]),
    "num_gpu_blocks": (500, lambda new, old: new.num_gpu_blocks == 500),
    "cpu_hosts": (5, lambda new, old: new.num_cpu_blocks == 5 * old.num_cpu_blocks),
    "kernel": ("native", lambda new, old: new.kernel_of("apex") == new.kernel_of("neo") == "native"),
    "cpu_kv_dtype": ("int8", lambda new, old: new.num_cpu_blocks > 1.9 * old.num_cpu_blocks),
    "cpu_bandwidth_gb_s": (33, lambda new, old: new.cpu_attention_gb_s("apex") == 33),
    "reference_cpu_gb_s": (
        25,
        lambda new, old: (
            new.cpu_attention_gb_s("apex") == old.cpu_attention_gb_s("apex") * 25 / old.cpu_attention_gb_s("neo")
        ),
    ),
    "neo_launches": (
        True,
        lambda new, old: new.attention_launch_us("neo") == 300 > old.attention_launch_us("neo") == 0,
    ),
    "cpu_kv_gb": (50, lambda new, old: new.num_cpu_blocks == 50 * 10**9 // (16 * 128 * 1024)),
    "cpu_of_gpu_attention": (0.1, lambda new, old: new.cpu_attention_gb_s("apex") == pytest.approx(51)),
    "kernel_ratio": (1.0, lambda new, old: new.cpu_attention_gb_s("apex") == old.cpu_attention_gb_s("apex")),
    "host_read_gb_s": (30, lambda new, old: new.cpu_attention_gb_s("apex") < 30),
}


@pytest.mark.parametrize("field", SETTING)
def test_an_axis_of_the_setting_changes_it(field):
    value, changed = CHANGES[field]
    assert changed(setting_of({**PLACE, field: value}), setting_of(PLACE))
    assert setting_of({**PLACE, field: None}) == setting_of(PLACE) == load_setting("apex-a10")


def test_own_kernels_change_nothing_and_memory_is_read_by_the_chosen_kernel():
    assert setting_of({**PLACE, "kernel": "own"}) == setting_of(PLACE)
    native = setting_of({**PLACE, "kernel": "native", "host_read_gb_s": 30})
    slow, host = setting_of({**PLACE, "host_read_gb_s": 30}), load_host("dual-xeon-6342")
    shape = LayerShape.from_config(native.model_config)
    of_host = {kernel: cpu_attention_gb_s(host, kernel, shape) for kernel in ("native", "llamafile")}
    assert native.cpu_attention_gb_s("apex") > slow.cpu_attention_gb_s("apex")
    assert of_host["native"] > of_host["llamafile"]


TASK_CHANGES = {
    "hand_over_us": (50, lambda new, old: new.hardware.table.hand_over.seconds == pytest.approx((5e-5, 5e-5))),
    "without": ("lockstep", lambda new, old: new.strategy.disable_asymmetric_pipelining),
    "actual_over_believed": (
        2.0,
        lambda new, old: new.hardware == old.hardware and new.believed not in (None, old.hardware.table),
    ),
    "online_correction": (False, lambda new, old: new.strategy.disable_online_correction),
    "slower": (1.5, lambda new, old: new.believed == old.hardware.table != new.hardware.table),
    "ttft_slo_s": (9.0, lambda new, old: new.strategy.ttft_slo_s == 9.0),
    "tpot_slo_s": (9.0, lambda new, old: new.strategy.tpot_slo_s == 9.0),
    "admission_control": (False, lambda new, old: new.strategy.disable_admission_control),
    "one_class": (True, lambda new, old: new.one_class),
    "duration_s": (9.0, lambda new, old: new.duration_s == 9.0),
    "synchronous": (True, lambda new, old: new.synchronous and not old.synchronous),
    "with_bound": (True, lambda new, old: new.values["with_bound"] and "with_bound" not in old.values),
    "whole_swaps": (True, lambda new, old: new.whole_swaps and not old.whole_swaps),
    "vllm_defaults": (True, lambda new, old: new.vllm_defaults and new.cached_tiers == (Tier.GPU,) != old.cached_tiers),
}


@pytest.mark.parametrize("field", TASK)
def test_an_axis_of_the_task_changes_it(field):
    value, changed = TASK_CHANGES[field]
    place = {**PLACE, "system": VLLM} if field == "vllm_defaults" else PLACE
    assert changed(simulate({**place, field: value}), simulate(place))
    assert simulate({**place, field: None}) == simulate(place)


def test_what_a_attention_task_costs_is_what_schedulers_believe():
    task = simulate({**PLACE, "hand_over_us": 50, "actual_over_believed": 2.0})
    assert task.believed.hand_over == task.hardware.table.hand_over != simulate(PLACE).hardware.table.hand_over


def test_strategies_of_several_axes_add_up():
    strategy = simulate({**PLACE, "ttft_slo_s": 9.0, "tpot_slo_s": 8.0, "admission_control": False}).strategy
    assert (strategy.ttft_slo_s, strategy.tpot_slo_s, strategy.disable_admission_control) == (9.0, 8.0, True)


def test_gpu_only_systems_run_once_where_the_cpu_varies():
    grid = Grid.read({**PLACE, "system": ["swiftllm", "apex"]}, FIELDS)
    for field in ("host_read_gb_s", "cpu_bandwidth_gb_s", "actual_over_believed"):
        places = grid.with_(**{field: [1.5, 2.5]}).places(concerns)
        assert [(place["system"], place[field]) for place in places] == [
            ("swiftllm", None),
            ("apex", 1.5),
            ("apex", 2.5),
        ]
    assert len(grid.with_(num_gpu_blocks=[500, 600]).places(concerns)) == 4
