"""4-bit products by the optional library: its layouts, its faults, and when it is used. The library is imitated."""

from __future__ import annotations

import gc
import sys
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from quantise import write_folder

from swiftllm.config import EngineConfig
from swiftllm.model.placement import Place, Placement
from swiftllm.model.quantised_weights import sort_into_runs
from swiftllm.ops import library
from swiftllm.ops.interface import Ops
from swiftllm.ops.library import LibraryLinear, LibraryProducts, library_tensors
from swiftllm.ops.matrices import ExpertWeights, QuantisedMatrix, add_slots
from swiftllm.runtime import execution_context
from swiftllm.runtime.cpu_tier import InlineWorker
from swiftllm.runtime.execution_context import select_ops
from swiftllm.runtime.graphs import ROW_BUCKETS
from swiftllm.runtime.torch_backend import open_torch_backend
from tests.reference.backend_driver import BackendDriver
from tests.reference.fake_humming import FakeHumming, install_fake_humming, nibbles
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


def random_mxfp4(out: int, inputs: int, lowest: int = 115, highest: int = 121) -> QuantisedMatrix:
    blocks = torch.randint(256, (out, inputs // 32, 16), dtype=torch.uint8)
    scales = torch.randint(lowest, highest, (out, inputs // 32), dtype=torch.uint8)
    return QuantisedMatrix.from_mxfp4(blocks, scales, torch.float16)


def own_linear(matrix: QuantisedMatrix, bias: torch.Tensor | None) -> Callable:
    return Ops().make_quantised_linear(matrix, bias)


class Clock:
    """Tells how long products take: those of ``own`` kernels, and the library's, by their number of rows."""

    def __init__(self, fake: FakeHumming, own: float = 2.0, slow_rows: tuple[int, ...] = ()) -> None:
        self.fake, self.own, self.slow_rows = fake, own, slow_rows
        self.timed: list[float] = []

    def __call__(self, work: Callable[[], torch.Tensor], device: torch.device) -> float:
        before = self.fake.products
        rows = len(work())
        is_own = self.fake.products == before
        self.timed.append(self.own if is_own else 2 * self.own if rows in self.slow_rows else 0.5 * self.own)
        return self.timed[-1]


def choose(fake: FakeHumming, matrix: QuantisedMatrix, bias: torch.Tensor | None = None, **clock):
    """The linear, the own one and what chose between them."""
    products, own = LibraryProducts(Clock(fake, **clock)), own_linear(matrix, bias)
    return products.choose_linear(matrix, bias, own), own, products


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
    mxfp4 = schema(b_dtype="float4e2m1", bs_dtype="float8e8m0", weight_scale_group_size=32)
    stack = library_tensors(random_mxfp4(3 * 64, 96), torch.zeros(3 * 64).half(), 3)
    mxfp4.validate_tensors(stack, 64, 96, param_dtype=torch.float16, num_experts=3, has_bias=True)
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
    linear, own, products = choose(fake, matrix, bias)
    assert isinstance(linear, LibraryLinear) and linear is not own
    assert products.description == "humming-kernels 0.1.19"
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
    fake, matrix = install_fake_humming(monkeypatch), random_matrix(ordered=True)
    codes = weakref.ref(matrix.codes)
    linear = LibraryProducts(Clock(fake)).choose_linear(matrix, None, own_linear(matrix, None))
    del matrix
    gc.collect()
    assert codes() is None and isinstance(linear, LibraryLinear)


@pytest.mark.parametrize(
    "faults, matrix, reason",
    [
        ({"cannot_compile": True}, {}, "nvcc was not found"),
        ({"is_wrong": True}, {}, "128 x 256 in groups of 64.*of 1 rows its products differ by up to"),
        ({}, {"out": 72}, "AssertionError"),
        ({}, {"out": 68}, "multiple of 8"),
    ],
    ids=str,
)
def test_what_the_library_cannot_is_left_to_others(faults, matrix, reason, monkeypatch) -> None:
    fake, matrix = install_fake_humming(monkeypatch, **faults), random_matrix(**matrix)
    with pytest.warns(UserWarning, match=reason):
        linear, own, products = choose(fake, matrix)
    assert linear is own and products.description is None
    packed = fake.packed
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once, and other matrices of that kind are not tried
        assert products.choose_linear(matrix, None, own) is own
    assert fake.packed == packed


def test_a_wrong_output_among_thousands_is_noticed(monkeypatch) -> None:
    fake = install_fake_humming(monkeypatch, is_wrong=True)
    with pytest.warns(UserWarning, match="differ by"):
        linear, own, _ = choose(fake, random_matrix(4096, 64, 32))
    assert linear is own


def test_a_library_of_another_interface_is_left_alone(monkeypatch) -> None:
    fake = install_fake_humming(monkeypatch)
    monkeypatch.delattr(sys.modules["humming.forward"], "humming_forward")
    with pytest.warns(UserWarning, match="ImportError") as said:
        linear, own, products = choose(fake, random_matrix())
        assert linear is own
        assert products.choose_linear(random_matrix(64, 96, 96), None, own) is own
    assert len(said) == 1 and not fake.packed


@pytest.mark.parametrize("slow_rows", [(16,), (512,), library.TIMED_ROWS])
def test_what_is_not_faster_for_few_rows_and_for_many_is_left_to_own_kernels(slow_rows, monkeypatch, caplog) -> None:
    fake, matrix = install_fake_humming(monkeypatch), random_matrix()
    linear, own, products = choose(fake, matrix, slow_rows=slow_rows)
    assert linear is own and products.description is None
    assert "own kernels multiply 4-bit matrices of 128 x 256 in groups of 64" in caplog.text
    packed = fake.packed
    assert products.choose_linear(matrix, None, own) is own and fake.packed == packed


def test_times_that_are_near_do_not_change_the_kernels(monkeypatch) -> None:
    install_fake_humming(monkeypatch)
    matrix = random_matrix()
    for its, is_chosen in ((0.97, False), (0.94, True)):
        own = own_linear(matrix, None)
        times = iter([1.0, its] * 2 * library.REPEATS)  # a pair is longer than all that a trial may take
        products = LibraryProducts(lambda work, device, times=times: next(times))
        assert (products.choose_linear(matrix, None, own) is not own) is is_chosen


def test_a_kind_is_timed_once_within_limits_and_every_matrix_is_compared(monkeypatch) -> None:
    fake = install_fake_humming(monkeypatch)
    clock = Clock(fake, own=1e-6)
    products, matrix = LibraryProducts(clock), random_matrix()
    assert isinstance(products.choose_linear(matrix, None, own_linear(matrix, None)), LibraryLinear)
    assert len(clock.timed) == 2 * len(library.TIMED_ROWS) * library.REPEATS
    assert fake.products == len(library.FIRST_ROWS) + len(clock.timed) // 2
    before = fake.products
    matrix = random_matrix()
    assert isinstance(products.choose_linear(matrix, None, own_linear(matrix, None)), LibraryLinear)
    assert fake.products == before + len(library.CHECKED_ROWS)
    fake.is_wrong, matrix = True, random_matrix()
    own = own_linear(matrix, None)
    with pytest.warns(UserWarning, match="differ by"):
        assert products.choose_linear(matrix, None, own) is own
    slow = Clock(fake, own=1.0)
    fake.is_wrong, products = False, LibraryProducts(slow)
    products.choose_linear(matrix, None, own)
    assert len(slow.timed) == 2 * len(library.TIMED_ROWS)


def test_all_kinds_are_counted(monkeypatch) -> None:
    fake = install_fake_humming(monkeypatch)
    products = LibraryProducts(Clock(fake))
    for out in (128, 192, 72):  # the library does not take the last
        matrix = random_matrix(out)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            products.choose_linear(matrix, None, own_linear(matrix, None))
    assert products.description == "humming-kernels 0.1.19 (2 of 3 kinds of matrices)"


def test_every_number_of_rows_that_is_captured_was_launched_before() -> None:
    assert set(ROW_BUCKETS) <= set(library.FIRST_ROWS)


@pytest.mark.parametrize("kind", ["4-bit", "MXFP4", "MXFP4 beyond float16", "16 bits"])
def test_products_of_experts_are_tried_as_a_whole(kind, monkeypatch) -> None:
    grouped = pytest.importorskip("swiftllm.ops.triton.matrices", reason="Triton is not installed")
    fake, experts, hidden, ffn = install_fake_humming(monkeypatch), 3, 64, 64
    lowest = 100 if "beyond" in kind else 115
    make = {
        "4-bit": lambda out, n: random_matrix(out, n, 32),
        "16 bits": lambda out, n: torch.randn(out, n).half(),
    }.get(kind, lambda out, n: random_mxfp4(out, n, lowest))
    stacks = make(experts * 2 * ffn, hidden), make(experts * hidden, ffn)
    biases = {"gate_up_bias": torch.randn(experts * 2 * ffn).half(), "down_bias": torch.randn(experts * hidden).half()}
    weights = ExpertWeights(torch.randn(experts, hidden).half(), *stacks, 2, True, **biases)
    own, made = Ops().make_experts(weights), []

    def of_products(gate_up, down) -> Callable:
        """In place of the kernels around them, which need a GPU: experts one by one."""
        made.append((gate_up, down))

        def compute(x: torch.Tensor) -> torch.Tensor:
            ids, likelihoods = own._router(x, None)
            pairs = torch.argsort(ids.flatten(), stable=True)
            counts = torch.bincount(ids.flatten(), minlength=experts)
            starts = torch.cat((counts.new_zeros(1), counts.cumsum(0))).int()
            products = torch.empty(len(pairs), hidden, dtype=x.dtype)
            products[pairs] = down(Ops().silu_and_mul(gate_up(x[pairs // 2], starts)), starts)
            return add_slots(products.view(-1, 2, hidden), likelihoods)

        return compute

    assert grouped.GroupedProduct is library.GroupedProduct
    products = LibraryProducts(Clock(fake))
    chosen = products.choose_experts(weights, own, of_products)
    assert (chosen is own) is (kind == "16 bits") and bool(made) is (kind != "16 bits")
    if made:
        x = torch.randn(5, hidden).half()
        assert library.largest_difference(chosen(x), own(x)) < 0.02
        fake.swaps_experts, products = True, LibraryProducts(Clock(fake))
        with pytest.warns(UserWarning, match="3 experts' .* of 128 x 64 and 64 x 64.* differ by up to"):
            assert products.choose_experts(weights, own, of_products) is own


def test_differences_are_of_single_elements_and_nan_is_one() -> None:
    expected = torch.randn(4, 256)
    actual = expected.clone()
    assert library.largest_difference(actual, expected) == 0.0
    actual[2, 7] += 0.5 * expected[2].square().mean().sqrt()
    assert library.largest_difference(actual, expected) == pytest.approx(0.5, rel=1e-4)
    actual[1, 3] = torch.nan
    assert library.largest_difference(actual, expected) == float("inf")


@pytest.mark.parametrize(
    "capability, dtype, installed, is_faster, multiplies",
    [
        ((7, 5), torch.float16, True, True, True),
        ((7, 5), torch.float16, True, False, False),
        ((7, 5), torch.float32, True, True, False),
        ((7, 5), torch.float16, False, True, False),
        ((8, 6), torch.float16, True, True, True),
        ((8, 6), torch.float16, True, False, False),
        ((8, 6), torch.float16, False, True, False),
    ],
)
def test_gpus_use_it_where_it_is_installed_and_faster(
    capability, dtype, installed, is_faster, multiplies, monkeypatch
) -> None:
    TritonOps = pytest.importorskip("swiftllm.ops.triton.ops", reason="Triton is not installed").TritonOps
    major, minor = capability
    gpu = SimpleNamespace(name="GPU", major=major, minor=minor, multi_processor_count=40)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr("swiftllm.runtime.execution_context.why_no_triton", lambda capability: None)
    monkeypatch.setattr(TritonOps, "_make_own_linear", lambda self, matrix, bias: own_linear(matrix, bias))
    fake = install_fake_humming(monkeypatch)
    clock = Clock(fake, slow_rows=() if is_faster else (16,))
    monkeypatch.setattr(library, "seconds_on_device", clock)
    if not installed:
        monkeypatch.setattr(library, "version", lambda package: (_ for _ in ()).throw(PackageNotFoundError(package)))
    ops, matrix = select_ops(torch.device("cuda"), dtype), random_matrix()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        linear = ops.make_quantised_linear(matrix, None)
    assert isinstance(linear, LibraryLinear) is multiplies
    assert ops.by_library == ("humming-kernels 0.1.19" if multiplies else None)
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

    def __init__(self, fake: FakeHumming) -> None:
        self.library = LibraryProducts(Clock(fake))

    in_place = Ops()
    by_library = "a library"

    def make_quantised_linear(self, matrix, bias):
        return self.library.choose_linear(matrix, bias, own_linear(matrix, bias))


def test_resident_stages_are_the_librarys_and_streamed_ones_are_not(tiny_model_dir, tmp_path, monkeypatch) -> None:
    """A slot's matrix changes from stage to stage, so nobody may keep a copy of it."""
    fake, folder = install_fake_humming(monkeypatch), tmp_path / "awq"
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    write_folder(tiny_model_dir(**sizes), folder, "awq", 32)
    monkeypatch.setattr(execution_context, "select_ops", lambda *_: OpsWithLibrary(fake))
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
