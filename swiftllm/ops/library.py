"""Products of 4-bit weights by humming-kernels, an optional library, where it measures faster than the own kernels.

The library keeps a matrix in a layout of its own and compiles its kernels for the GPU when they are first needed. So
products are tried when the weights are loaded, before graphs are captured. Those of every matrix are compared with the
own kernels', and for each kind of matrix, which is its format, shape and group size, both are timed. A matrix that the
library does not take, multiplies wrongly or multiplies no faster is left to the own kernels, and a line says why. One
form of a matrix is kept: both are there while a layer is tried.

The library may split sums among programs that add their parts in 16 bits in the order in which they end. It is told not
to: a product with equal rows has equal bits. A row's last bits may depend on the number of rows, as those of the own
kernels may.
"""

from __future__ import annotations

import json
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from swiftllm.ops.interface import Linear
from swiftllm.ops.matrices import BITS, CODES_PER_WORD, MXFP4_GROUP, Experts, ExpertWeights, QuantisedMatrix

PACKAGE, VERSION = "humming-kernels", "0.1.19"  # its interface differs from version to version
# Of a product with new kernels. These differ by their tiles of rows, and none may be loaded in a capture: all numbers
# of rows that are captured, and more.
FIRST_ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 512)
CHECKED_ROWS = (1, 17, 300)  # of every other product
TIMED_ROWS = (16, 512)  # of a decode, of a prefill
REPEATS = 5
TRIAL_S = 0.05  # repeats end after this
LEAST_GAIN = 1.05  # times that are nearer may fall the other way at the next start
# By dtype, of differences of single elements, as a part of their row's root mean square. Both kernels round weights,
# scales and products to it. Outputs or experts in a wrong order give more than 1.
MOST_DIFFERENCE = {torch.float16: 2**-5, torch.bfloat16: 2**-3}
SLEEP_CYCLES = 2_000_000  # of the GPU, about a millisecond: longer than launching an FFN of experts takes the host

GroupedProduct = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From rows that are sorted by experts, and int32 ``starts [num_experts + 1]`` of each expert's rows, to products."""

logger = logging.getLogger(__name__)


def installed_version() -> str | None:
    """Of the library; None where it is not installed."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return None


def how_to_install() -> str:
    """What to type; the kernels are compiled with the compiler of torch's CUDA."""
    cuda = (torch.version.cuda or "13").split(".")[0]
    return f"{PACKAGE} multiplies them as they are: type `pip install '{PACKAGE}[cu{cuda}]=={VERSION}'`"


class LibraryProducts:
    """Chooses between own products of 4-bit matrices and the library's, in 16 bits on an NVIDIA GPU."""

    def __init__(self, seconds: Callable[[Callable[[], object], torch.device], float] | None = None) -> None:
        """``seconds``: how long a call takes on a device; by default as measured there."""
        self._seconds = seconds or seconds_on_device
        self._is_faster: dict[str, bool] = {}  # by kind of matrix
        self._launched: set[str] = set()  # kernels that were launched for all numbers of rows that are captured
        self._has_begun = self._is_broken = False

    @property
    def description(self) -> str | None:
        """The library, its version and, if not all, how many kinds of matrices it multiplies; None: it is not used."""
        used, tried = sum(self._is_faster.values()), len(self._is_faster)
        if not used:
            return None
        return f"{PACKAGE} {installed_version()}" + (f" ({used} of {tried} kinds of matrices)" if used < tried else "")

    def choose_linear(self, matrix: QuantisedMatrix, bias: torch.Tensor | None, own: Linear) -> Linear:
        """``own`` or the library's linear, which has a copy of the matrix, of which nothing is kept then."""
        kind = f"{_format(matrix)} of {matrix.out_features} x {matrix.in_features}{_groups(matrix)}"
        inputs = matrix.in_features
        if matrix.runs is not None and matrix.order is not None:  # some inputs are there more than once
            inputs = int(matrix.order.max()) + 1

        def make() -> tuple[Linear, set[str]]:
            linear = LibraryLinear(matrix, bias)
            return linear, {linear.product.kernels}

        return self._choose(kind + ("" if bias is None else " with a bias"), own, make, inputs, matrix)

    def choose_experts(
        self,
        weights: ExpertWeights,
        own: Experts,
        with_products: Callable[[GroupedProduct, GroupedProduct], Experts],
    ) -> Experts:
        """The same for an FFN of experts. ``with_products`` makes it of the products of all experts' gate and up, and
        of their down; then it keeps none of the matrices."""
        (gate_up, down), count = weights.stacks, weights.num_experts
        if isinstance(gate_up, torch.Tensor) or isinstance(down, torch.Tensor):
            return own
        sizes = f"{gate_up.out_features // count} x {gate_up.in_features}"
        sizes += f" and {down.out_features // count} x {down.in_features}{_groups(gate_up)}"
        kind = f"{count} experts' {_format(gate_up)} of {sizes}" + (
            "" if weights.gate_up_bias is None else " with biases"
        )

        def make() -> tuple[Experts, set[str]]:
            products = [
                LibraryProduct(stack, bias, count)
                for stack, bias in ((gate_up, weights.gate_up_bias), (down, weights.down_bias))
            ]
            return with_products(*products), {product.kernels for product in products}

        return self._choose(kind, own, make, gate_up.in_features, gate_up)

    def _choose(
        self,
        kind: str,
        own: Callable,
        make: Callable[[], tuple[Callable, set[str]]],
        inputs: int,
        like: QuantisedMatrix,
    ) -> Callable:
        """``own``, or what ``make`` makes together with the names of its kernels. ``like`` has their dtype and
        device."""
        if self._is_broken or not self._is_faster.get(kind, True):
            return own
        if not self._has_begun:
            logger.warning("%s compiles its kernels at the first start, for a minute or so, and keeps them", PACKAGE)
            self._has_begun = True
        generator = torch.Generator(like.codes.device).manual_seed(0)

        def random_rows(rows: int) -> torch.Tensor:
            x = torch.randn(rows, inputs, device=like.codes.device, generator=generator)
            return x.to(like.dtype)

        try:
            made, kernels = make()
            for rows in CHECKED_ROWS if kernels <= self._launched else FIRST_ROWS:
                x = random_rows(rows)
                if (difference := largest_difference(made(x), own(x))) > MOST_DIFFERENCE[like.dtype]:
                    raise ArithmeticError(f"of {rows} rows its products differ by up to {difference:.2g} of their size")
            self._launched |= kernels
            if kind not in self._is_faster:
                self._is_faster[kind] = self._measure(kind, own, made, random_rows)
        except Exception as failed:  # of a library that compiles at run time: assertions, compilers, drivers
            reason = f"{type(failed).__name__}: {failed}" if str(failed) else type(failed).__name__
            if isinstance(failed, ImportError):
                self._is_broken, kind = True, "matrices"
            else:
                self._is_faster.setdefault(kind, False)
            warnings.warn(f"{PACKAGE} does not multiply {kind}: {reason}", stacklevel=3)
            return own
        return made if self._is_faster[kind] else own

    def _measure(self, kind: str, own: Callable, made: Callable, random_rows: Callable[[int], torch.Tensor]) -> bool:
        """Whether the library is faster with few rows and with many, which a line of the log tells."""
        is_faster, times = True, []
        for rows in TIMED_ROWS:
            x, taken = random_rows(rows), ([], [])
            while len(taken[0]) < REPEATS and sum(map(sum, taken)) < TRIAL_S:
                for seconds, product in zip(taken, (own, made), strict=True):
                    seconds.append(self._seconds(lambda product=product, x=x: product(x), x.device))
            own_s, its_s = map(statistics.median, taken)
            is_faster &= its_s * LEAST_GAIN < own_s
            times.append(f"{rows} rows in {its_s * 1e6:.0f} us, own kernels {own_s * 1e6:.0f}")
        who = f"{PACKAGE} multiplies" if is_faster else "own kernels multiply"
        logger.warning("%s %s: %s takes %s", who, kind, PACKAGE, "; ".join(times))
        return is_faster


def seconds_on_device(work: Callable[[], object], device: torch.device) -> float:
    """Of one call. On a GPU without what launching takes the host, as in a captured graph, and with an empty cache."""
    if device.type == "cpu":
        start_s = time.perf_counter()
        work()
        return time.perf_counter() - start_s
    cache_bytes = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.empty(2 * cache_bytes, dtype=torch.uint8, device=device).zero_()
    torch.cuda._sleep(SLEEP_CYCLES)
    start.record()
    work()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3


def largest_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Of elements of ``[rows, columns]``, as a part of the expected row's root mean square; ``inf`` with NaN."""
    expected = expected.float()
    sizes = expected.square().mean(1).sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    largest = float(((actual.float() - expected).abs().amax(1) / sizes).max())
    return largest if largest == largest else float("inf")


class LibraryProduct:
    """Products with a 4-bit matrix, or with those of several experts that lie one below the other, in 16 bits.

    Scales of integers are rounded to the dtype of the products, as in the library's layout.

    Attributes:
        kernels: names the kernels that multiply; equal ones are compiled and loaded once.
    """

    def __init__(self, matrix: QuantisedMatrix, bias: torch.Tensor | None, num_experts: int = 0) -> None:
        """Without ``num_experts`` it is one matrix. Raises whatever the library raises."""
        from humming.forward import humming_forward
        from humming.schema import HummingWeightSchema
        from humming.transform import prepare_fp16_e8m0_scale, prepare_layer_config, transform_humming_tensors
        from humming.tune import get_heuristics_config

        if matrix.dtype not in MOST_DIFFERENCE:
            raise ValueError(f"no products in {matrix.dtype}")
        device, self._out_features = matrix.codes.device, matrix.out_features // (num_experts or 1)
        config = prepare_layer_config(
            self._out_features,
            matrix.in_features,
            HummingWeightSchema(**_schema(matrix)),
            num_experts=num_experts or None,
            has_bias=bias is not None,
            torch_dtype=matrix.dtype,
            device=device,
        )
        tensors = library_tensors(matrix, bias, num_experts)
        config, tensors = prepare_fp16_e8m0_scale(config, tensors)  # scales that float16 cannot hold
        self._tensors = transform_humming_tensors(config, tensors)
        kind = "grouped_contiguous" if num_experts else "dense"
        # Its choice by the number of rows, but for the split of sums: the parts are added in the order in which they
        # end, by atomic operations in 16 bits.
        ranges = get_heuristics_config(config, gemm_type=kind, device=device)
        ranges = [[first, last, {**how, "use_stream_k": False}] for first, last, how in ranges]
        how = {"compute_config": json.dumps({"gemm_type": kind}), "tuning_config": json.dumps(ranges)}
        self._forward: Callable[..., Any] = humming_forward
        self._config, self._how = config, how
        self.kernels = f"{config.to_str()} {kind}"

    def __call__(
        self, x: torch.Tensor, starts: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Of contiguous rows ``[rows, in]``, in a contiguous ``out [rows, out]`` if that is given. With experts rows
        ``starts[e]`` to ``starts[e + 1]`` are those of expert e; what lies behind the last one's is not written."""
        out = x.new_empty((x.shape[0], self._out_features)) if out is None else out
        if x.shape[0]:
            self._forward(self._config, inputs=x, outputs=out, expert_layout=starts, **self._how, **self._tensors)
        return out


class LibraryLinear:
    """``x weight^T + bias`` of a 4-bit matrix in its own order of inputs."""

    def __init__(self, matrix: QuantisedMatrix, bias: torch.Tensor | None) -> None:
        """Raises whatever the library raises."""
        self._order = matrix.order
        self.product = LibraryProduct(matrix if matrix.runs is None else matrix.with_taken_inputs(), bias)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        x = x.contiguous() if self._order is None else x.index_select(1, self._order)
        is_given = out is not None and out.is_contiguous()
        made = self.product(x, out=out if is_given else None)
        return made if out is None or is_given else out.copy_(made)


def _format(matrix: QuantisedMatrix) -> str:
    return "MXFP4 matrices" if matrix.is_mxfp4 else "4-bit matrices"


def _groups(matrix: QuantisedMatrix) -> str:
    return "" if matrix.is_mxfp4 else f" in groups of {matrix.group_size}"


def _schema(matrix: QuantisedMatrix) -> dict[str, Any]:
    """The format of the tensors, as the library names it."""
    if matrix.is_mxfp4:
        return {"b_dtype": "float4e2m1", "bs_dtype": "float8e8m0", "weight_scale_group_size": MXFP4_GROUP}
    is_one_group = matrix.group_size == matrix.in_features
    return {
        "b_dtype": f"uint{BITS}",
        "weight_scale_group_size": 0 if is_one_group else matrix.group_size,
        "has_zero_point": True,  # also where all are 8: the library takes some codes without zero points for signed
    }


def library_tensors(
    matrix: QuantisedMatrix, bias: torch.Tensor | None, num_experts: int = 0
) -> dict[str, torch.Tensor]:
    """A matrix without ``runs`` as the library takes it: int32 ``weight [out, in / 8]`` of neighbouring inputs' codes,
    ``weight_scale [out, groups]``, of integers int32 ``zero_point [out / 8, groups]``, and the bias if there is one.
    With ``num_experts`` all have a dimension of experts before these."""
    out_features = matrix.out_features // (num_experts or 1)
    if out_features % CODES_PER_WORD or matrix.in_features % CODES_PER_WORD:
        raise ValueError(f"{out_features} x {matrix.in_features} has no multiple of {CODES_PER_WORD}")
    if not num_experts:
        tensors = _tensors(matrix)
        return tensors if bias is None else tensors | {"bias": bias}
    stacked: dict[str, torch.Tensor] = {}
    for expert in range(num_experts):  # codes are unpacked to four times as much memory and more
        own = slice(expert * out_features, (expert + 1) * out_features)
        for name, tensor in _tensors(matrix.of_outputs(own)).items():
            if not expert:
                stacked[name] = tensor.new_empty((num_experts, *tensor.shape))
            stacked[name][expert] = tensor
    return stacked if bias is None else stacked | {"bias": bias.view(num_experts, out_features)}


def _tensors(matrix: QuantisedMatrix) -> dict[str, torch.Tensor]:
    scales = matrix.scales.t().contiguous()
    tensors = {"weight": _words(matrix.unpack()).t().contiguous()}
    if matrix.zeros is None:  # MXFP4
        return tensors | {"weight_scale": scales.view(torch.float8_e8m0fnu)}
    return tensors | {"weight_scale": scales.to(matrix.dtype), "zero_point": _words(matrix.zeros.t()).contiguous()}


def _words(codes: torch.Tensor) -> torch.Tensor:
    """uint8 ``[8 n, columns]`` as int32 ``[n, columns]``: bits ``4 j`` of a word are the j-th of its codes."""
    parts = codes.unflatten(0, (-1, CODES_PER_WORD))
    words = torch.zeros(parts.shape[0], parts.shape[2], dtype=torch.int32, device=codes.device)
    for j in range(CODES_PER_WORD):
        words |= parts[:, j].int() << BITS * j
    return words
