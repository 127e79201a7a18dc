"""Hardware files: what they must hold, and how broken ones are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from apex.simulator.hardware_files import (
    ASSUMPTIONS_FILE,
    HARDWARE_DIR,
    STATUSES,
    LayerShape,
    known_hardware,
    load_gpu,
    load_host,
    load_model_config,
    read_figures,
)
from apex.simulator.predicted_profile import hardware_profile
from tests.apex.simulator.machines import GPUS, HOSTS, LLAMA_2_7B, LLAMA_3_8B, profile, write_gpu


def test_known_machines() -> None:
    assert known_hardware("gpu") == sorted(GPUS)
    assert known_hardware("host") == sorted(HOSTS)


@pytest.mark.parametrize("path", sorted(HARDWARE_DIR.rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_number_has_an_origin_and_a_status(path: Path) -> None:
    raw = yaml.safe_load(path.read_text())
    sections = raw["figures"].values() if "figures" in raw else [raw]
    for section in sections:
        assert section["status"] in STATUSES
        assert len(section["origin"]) > 5 and section["unit"]
    if "figures" in raw:  # and no number stands beside the figures
        assert all(isinstance(value, str | list) for key, value in raw.items() if key != "figures")


@pytest.mark.parametrize("family, channels_gb_s", [("g4dn", 140.8), ("g5", 204.8)])
def test_instances_of_a_family_have_their_part_of_one_socket(family: str, channels_gb_s: float) -> None:
    """AWS's list: instance n has 4n vCPUs and 16n GiB. Two vCPUs are a core. NEO measured the share of g5.2xlarge."""
    sockets = {"g4dn": 24, "g5": 48}
    for name in [name for name in HOSTS if name.startswith(family)]:
        host, size = load_host(name), int(name.removeprefix(f"{family}-").removesuffix("xlarge") or 1)
        assert (host["cores"], host["memory_gb"], host["peak_bandwidth_gb_s"]) == (2 * size, 16 * size, channels_gb_s)
        if name != "g5-2xlarge":
            assert host["core_share"] == pytest.approx(2 * size / sockets[family], rel=0.002)
        assert host.name.startswith(name.replace("-", ".", 1))


def test_measured_layers_belong_to_their_gpu() -> None:
    for path in (HARDWARE_DIR / "measured").glob("*.yaml"):
        raw = yaml.safe_load(path.read_text())
        listed = yaml.safe_load((HARDWARE_DIR / f"{raw['gpu']}.yaml").read_text())["measured_layers"]
        assert f"measured/{path.name}" in listed
        assert len(raw["gemm"]) <= 40 and len(raw["elementwise"]) <= 40


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("host", HOSTS)
def test_every_pair_makes_a_profile(gpu: str, host: str) -> None:
    table = profile(gpu, host)
    assert table.identity["device"] == load_gpu(gpu).name
    assert table.identity["cpu"] == load_host(host).name
    assert table.identity["cpu_kernel"] == "native"
    assert "simulation" in table.identity["kind"]
    assert all(isinstance(value, str) for value in table.identity.values())


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'p100'.*a10.*h200.*t4"):
        load_gpu("p100")
    with pytest.raises(ValueError, match=r"'t4'.*dual-xeon-6130.*g5-8xlarge"):
        load_host("t4")
    with pytest.raises(ValueError, match=r"'gpt-2'.*llama-2-7b"):
        load_model_config("gpt-2")


def test_a_new_card_needs_its_data_sheet_alone(tmp_path: Path) -> None:
    gpu = load_gpu(write_gpu(tmp_path / "new.yaml"))
    table = hardware_profile(gpu, load_host("dual-xeon-6342"), LLAMA_3_8B)
    shape, assumed = LayerShape.from_config(LLAMA_3_8B), read_figures(ASSUMPTIONS_FILE)
    reading_s = shape.gemm_weights * 2 / (1000e9 * assumed["weight_read_fraction"].value)
    multiplying_s = 2 * shape.gemm_weights * 2048 / (200e12 * assumed["gemm_fraction"].value)
    assert table.linear(1) == pytest.approx(reading_s, rel=0.1)
    assert table.linear(2048) == pytest.approx(multiplying_s, rel=0.1)
    assert table.identity["linear"].startswith("data sheet")
    assert table.identity["gpu_attention"] == "assumed"


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"pcie_gb_s": None}, "lacks pcie_gb_s"), ({"memory_bandwith": 3.0}, "nothing uses memory_bandwith")],
)
def test_incomplete_and_misspelt_files_are_refused(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_gpu(write_gpu(tmp_path / "new.yaml", **changes))


def test_a_figure_that_stands_beside_the_figures_is_refused(tmp_path: Path) -> None:
    path = write_gpu(tmp_path / "new.yaml")
    path.write_text(path.read_text() + "\nint4_read_fraction: {value: 0.5}\n")
    with pytest.raises(ValueError, match=r"nothing uses int4_read_fraction; figures stand below `figures:`"):
        load_gpu(path)


def test_a_figure_without_a_status_is_refused(tmp_path: Path) -> None:
    path = write_gpu(tmp_path / "new.yaml")
    path.write_text(path.read_text().replace("status: published", "status: guessed", 1))
    with pytest.raises(ValueError, match=r"new\.yaml: figure .*status"):
        load_gpu(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("kind: gpu", "kind: [gpu", r"new\.yaml is not YAML: .*line"),
        ("figures:", "figure_list:", r"new\.yaml.*figures"),
        (r"value: 1000", "value: fast", r"new\.yaml: figure memory_bandwidth_gb_s: value='fast' must be a number"),
        (r"value: 1000", "value: .nan", r"new\.yaml: figure memory_bandwidth_gb_s: value=nan must be a number"),
        ("name: New card", "isa: avx2", r"new\.yaml lacks name"),
    ],
)
def test_a_broken_file_of_ones_own_is_refused_by_name(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = write_gpu(tmp_path / "new.yaml")
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        load_gpu(path)


@pytest.mark.parametrize("text", ["", "- 1", "just words"])
def test_a_file_that_holds_no_lines_of_a_machine_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "new.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"new\.yaml holds no lines such as `kind: gpu`"):
        load_gpu(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: m\ngemm: []\n", r"layer\.yaml lacks shape"),
        ("shape: {hidden_size: many}\ngemm: 3\n", r"layer\.yaml: .*num_kv_heads"),
    ],
)
def test_a_broken_file_of_measured_layers_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "layer.yaml").write_text(text)
    path = write_gpu(tmp_path / "new.yaml")
    path.write_text(path.read_text() + "\nmeasured_layers: [layer.yaml]\n")
    with pytest.raises(ValueError, match=message):
        load_gpu(path)


def test_a_host_is_no_gpu() -> None:
    with pytest.raises(ValueError, match="describes a host, not a gpu"):
        load_gpu(HARDWARE_DIR / "g5-4xlarge.yaml")


def test_models_have_the_published_sizes() -> None:
    assert LLAMA_2_7B.num_parameters == 6_738_415_616
    assert LLAMA_3_8B.num_parameters == 8_030_261_248
    assert load_model_config("llama-3.1-70b").num_parameters == 70_553_706_496
    assert LLAMA_2_7B.kv_bytes_per_token(2) == 524_288
    assert LLAMA_3_8B.kv_bytes_per_token(2) == 131_072
