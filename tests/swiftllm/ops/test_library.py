"""4-bit products by the optional library: its layouts, its faults, and who uses it. The library is imitated."""

from __future__ import annotations

import gc
import sys
import warnings
import weakref
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from quantise import write_folder

from swiftllm.config import EngineConfig
from swiftllm.model.boundaries.placement import Place, Placement
from swiftllm.model.weights.quantised.readers import sort_into_runs
from swiftllm.ops import library
from swiftllm.ops.interface import Ops
from swiftllm.ops.library import LibraryLinears, library_tensors
from swiftllm.ops.quantised_matrix import QuantisedMatrix
from swiftllm.ops.select import select_ops
from swiftllm.runtime import processors
from swiftllm.runtime.torch_backend import open_torch_backend
from swiftllm.runtime.workers import InlineWorker
from tests.reference.backend_driver import BackendDriver
from tests.reference.fake_humming import install_fake_humming, nibbles
from tests.reference.tolerances import assert_close
from tests.swiftllm.runtime.test_streams import DRIVES, outputs


@pytest.fixture(autouse=True)
def fresh_inputs() -> None:
    print("seed", torch.seed())


def random_matrix(
    out: int = 128, inputs: int = 256, group: int = 64, *, ordered: bool = False, scale_dtype=torch.float16
) -> QuantisedMatrix:
    groups = inputs // group
    codes = torch.randint(16, (inputs, out), dtype=torch.uint8)
    scales = ((0.1 + torch.rand(groups, out)) / (4 * inputs**0.5)).to(scale_dtype)
    zeros = torch.randint(16, (groups, out), dtype=torch.uint8)
    order = torch.randperm(inputs).int() if ordered else None
    return QuantisedMatrix.from_codes(codes, scales, zeros, group, torch.float16, order)


def rank_part(out: int, inputs: int, num_groups: int) -> QuantisedMatrix:
    groups = torch.randint(num_groups - 1, (inputs,))
    zeros = torch.randint(16, (num_groups, out), dtype=torch.uint8)
    scales = (0.1 + torch.rand(num_groups, out)) / (4 * inputs**0.5)
    codes, order, runs = sort_into_runs(torch.randint(16, (inputs, out), dtype=torch.uint8), zeros, groups)
    if len(runs) % 2:  # the library takes multiples of 32 inputs
        return rank_part(out, inputs, num_groups)
    return QuantisedMatrix.from_codes(codes, scales.half(), zeros, 128, torch.float16, order, runs)


def test_codes_and_zeros_are_where_the_library_reads_them() -> None:
    matrix = random_matrix()
    tensors = library_tensors(matrix, None)
    assert torch.equal(nibbles(tensors["weight"]), matrix.unpack().t())
    assert torch.equal(nibbles(tensors["zero_point"].t()), matrix.zeros)
    assert torch.equal(tensors["weight_scale"], matrix.scales.t())


def test_the_library_itself_takes_these_layouts() -> None:
    schema = pytest.importorskip("humming.schema", reason="humming-kernels is not installed").HummingWeightSchema
    for group in (32, 128, 256):
        tensors = library_tensors(random_matrix(group=group), torch.zeros(128).half())
        wanted = schema(b_dtype="uint4", weight_scale_group_size=0 if group == 256 else group, has_zero_point=True)
        wanted.validate_tensors(tensors, 128, 256, param_dtype=torch.float16, has_bias=True)


@pytest.mark.parametrize("rows", [0, 1, 33])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    "matrix",
    [
        lambda: random_matrix(),
        lambda: random_matrix(64, 96, 96),
        lambda: random_matrix(ordered=True),
        lambda: random_matrix(192, 160, 32, scale_dtype=torch.float32),
        lambda: rank_part(64, 512, 3),
    ],
    ids=["groups", "one group", "ordered", "float32 scales", "a rank's part"],
)
def test_products_are_those_of_the_dequantised_matrix(matrix, has_bias, rows, monkeypatch) -> None:
    fake = install_fake_humming(monkeypatch)
    matrix = matrix()
    bias = torch.randn(matrix.out_features).half() if has_bias else None
    linears = LibraryLinears()
    linear = linears.make(matrix, bias)
    assert linears.is_used and fake.products == len(library.CHECKED_ROWS)
    inputs = matrix.in_features if matrix.runs is None else 512
    wide = torch.full((rows, inputs + 8), torch.nan).half()
    x = wide[:, :inputs].copy_(torch.randn(rows, inputs))
    matrix = replace(matrix, scales=matrix.scales.half())  # as the library has them
    expected = x.double() @ matrix.dequantise().double().t() + (0 if bias is None else bias.double())
    assert_close(linear(x), expected, torch.float16)
    for out in (
        torch.full((rows, matrix.out_features), torch.nan).half(),
        wide.new_empty(rows, 512)[:, : len(matrix.codes[0])],
    ):
        assert linear(x, out=out) is out
        assert_close(out, expected, torch.float16)


def test_nothing_of_the_matrix_is_kept(monkeypatch) -> None:
    install_fake_humming(monkeypatch)
    matrix = random_matrix(ordered=True)
    codes = weakref.ref(matrix.codes)
    linear = LibraryLinears().make(matrix, None)
    del matrix
    gc.collect()
    assert codes() is None and linear is not None


@pytest.mark.parametrize(
    "faults, matrix, reason",
    [
        ({"cannot_compile": True}, {}, "nvcc was not found"),
        ({"is_wrong": True}, {}, "wrong by"),
        ({}, {"out": 72}, "AssertionError"),
        ({}, {"out": 68}, "multiple of 8"),
    ],
    ids=str,
)
def test_what_the_library_cannot_is_left_to_others(faults, matrix, reason, monkeypatch) -> None:
    install_fake_humming(monkeypatch, **faults)
    linears = LibraryLinears()
    with pytest.warns(UserWarning, match=reason):
        assert linears.make(random_matrix(**matrix), None) is None
    assert not linears.is_used


def test_a_wrong_output_among_thousands_is_noticed(monkeypatch) -> None:
    install_fake_humming(monkeypatch, is_wrong=True)
    with pytest.warns(UserWarning, match="wrong by"):
        assert LibraryLinears().make(random_matrix(4096, 64, 32), None) is None


def test_a_library_of_another_interface_is_left_alone(monkeypatch) -> None:
    install_fake_humming(monkeypatch)
    monkeypatch.delattr(sys.modules["humming.forward"], "humming_forward")
    with pytest.warns(UserWarning, match="ImportError"):
        assert LibraryLinears().make(random_matrix(), None) is None


@pytest.mark.parametrize(
    "capability, dtype, installed, multiplies",
    [
        ((7, 5), torch.float16, True, True),
        ((7, 5), torch.float32, True, False),
        ((7, 5), torch.float16, False, False),
        ((8, 6), torch.float16, True, False),
    ],
)
def test_only_cards_without_tensor_cores_in_triton_use_it(
    capability, dtype, installed, multiplies, monkeypatch
) -> None:
    pytest.importorskip("swiftllm.ops.triton.ops", reason="Triton is not installed")
    major, minor = capability
    gpu = SimpleNamespace(name="GPU", major=major, minor=minor, multi_processor_count=40)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr("swiftllm.ops.select.why_no_triton", lambda capability: None)
    fake = install_fake_humming(monkeypatch)
    if not installed:
        monkeypatch.setattr(library, "version", lambda package: (_ for _ in ()).throw(PackageNotFoundError(package)))
    ops, matrix = select_ops(torch.device("cuda"), dtype), random_matrix()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ops.make_quantised_linear(matrix, None)
    assert (fake.packed, ops.by_library) == ((1, "humming-kernels 0.1.19") if multiplies else (0, None))
    assert any("written out" in str(warning.message) for warning in said) is (major < 8 and not multiplies)
    assert any("pip install 'humming-kernels[cu" in str(warning.message) for warning in said) is (
        major < 8 and not installed
    )
    # The weights that arrive in slots are in the layout of checkpoints.
    packed = fake.packed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ops.in_place.make_quantised_linear(matrix, None)
    assert fake.packed == packed


class OpsWithLibrary(Ops):
    """As on a T4."""

    def __init__(self) -> None:
        self.library = LibraryLinears()

    in_place = Ops()
    by_library = "a library"

    def make_quantised_linear(self, matrix, bias):
        return self.library.make(matrix, bias)


def test_resident_boundaries_are_the_librarys_and_streamed_ones_are_not(tiny_model_dir, tmp_path, monkeypatch) -> None:
    """A slot's matrix changes from boundary to boundary, so nobody may keep a copy of it."""
    fake, folder = install_fake_humming(monkeypatch), tmp_path / "awq"
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    write_folder(tiny_model_dir(**sizes), folder, "awq", 32)
    monkeypatch.setattr(processors, "select_ops", lambda *_: OpsWithLibrary())
    config = EngineConfig(str(folder), dtype="float16", num_gpu_blocks=20, num_cpu_blocks=20, max_model_len=64)
    places = (Place.RESIDENT, Place.STREAMED, Place.STREAMED, Place.RESIDENT)  # before, between and after 3 layers
    backend = open_torch_backend(config, InlineWorker, placement=Placement(places))
    try:
        assert fake.packed == 1 + 3  # QKV of the first layer, the last layer; the vocabulary has 16 bits
        assert backend.weights_name == "4-bit AWQ, groups of 32, by a library"
        before = fake.products
        assert all(len(tokens) for tokens in outputs(DRIVES["few swaps"](BackendDriver(backend))))
        assert fake.products > before
    finally:
        backend.close()


def test_operations_without_a_library_say_so() -> None:
    assert Ops().by_library is None and select_ops(torch.device("cpu"), torch.float32).by_library is None


def test_the_version_that_is_advised_is_the_one_of_the_extra() -> None:
    setup = (Path(__file__).parents[3] / "setup.py").read_text()
    assert f"{library.PACKAGE}[cu13]=={library.VERSION}" in setup
    assert f"=={library.VERSION}" in library.how_to_install()
