"""Products of 4-bit weights by humming-kernels, an optional library, where Triton has no tensor cores (sm_75).

The library keeps a matrix in a layout of its own and compiles its kernels for the GPU when they are first needed. So a
linear is called when it is made: before graphs are captured, and to compare it with the reference. A matrix that the
library does not take, or multiplies wrongly, is left to others, and a warning says why.
"""

from __future__ import annotations

import logging
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from swiftllm.ops.interface import Linear
from swiftllm.ops.quantised_matrix import BITS, CODES_PER_WORD, QuantisedMatrix

PACKAGE, VERSION = "humming-kernels", "0.1.19"  # its interface differs from version to version
CHECKED_ROWS = (1, 17, 300)  # kernels differ by their tiles of rows
CHECKED_OUTPUTS = 1024  # compared at a time, so that little of the matrix is dequantised at once
MOST_ERROR = 0.01  # of the norm of a product: codes in a wrong order give 1.4, roundings to float16 0.0005
LOCKS = 2048  # as many as the library's own layers have; zeros before and after a product

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


class LibraryLinears:
    """Makes linears of 4-bit matrices with the library, for float16 on an NVIDIA GPU.

    Attributes:
        is_used: whether there is such a linear.
    """

    def __init__(self) -> None:
        self.is_used = False
        self._has_begun = False

    def make(self, matrix: QuantisedMatrix, bias: torch.Tensor | None) -> Linear | None:
        """See :meth:`swiftllm.ops.interface.Ops.make_quantised_linear`. The matrix is copied: nothing of it
        is kept. None, and a warning with the reason, if the library does not do for it."""
        if not self._has_begun:
            logger.warning("%s compiles its kernels at the first start, for a minute or so, and keeps them", PACKAGE)
            self._has_begun = True
        try:
            linear = LibraryLinear(matrix, bias)
            error = max(linear.error_of(rows, matrix, bias) for rows in CHECKED_ROWS)
        except Exception as failed:  # of a library that compiles at run time: assertions, compilers, drivers
            reason = f"{type(failed).__name__}: {failed}" if str(failed) else type(failed).__name__
        else:
            if error <= MOST_ERROR:
                self.is_used = True
                return linear
            reason = f"its products are wrong by {error:.2g} of their norm"
        shape = f"{matrix.out_features} x {matrix.in_features} in groups of {matrix.group_size}"
        warnings.warn(f"{PACKAGE} does not multiply 4-bit matrices of {shape}: {reason}", stacklevel=2)
        return None


class LibraryLinear:
    """``x weight^T + bias`` of a 4-bit matrix, float16. Scales are rounded to float16, sums are the library's."""

    def __init__(self, matrix: QuantisedMatrix, bias: torch.Tensor | None) -> None:
        """Raises whatever the library raises."""
        from humming.forward import humming_forward
        from humming.schema import HummingWeightSchema
        from humming.transform import prepare_and_transform_humming_tensors

        if matrix.dtype is not torch.float16 or matrix.is_mxfp4:
            raise ValueError("only integers are multiplied, in float16")
        self._order = matrix.order
        matrix = matrix if matrix.runs is None else matrix.with_taken_inputs()
        device = matrix.codes.device
        is_one_group = matrix.group_size == matrix.in_features
        schema = HummingWeightSchema(
            b_dtype=f"uint{BITS}",
            weight_scale_group_size=0 if is_one_group else matrix.group_size,
            has_zero_point=True,  # also where all are 8: the library takes some codes without zero points for signed
        )
        self._config, self._tensors = prepare_and_transform_humming_tensors(
            library_tensors(matrix, bias),
            matrix.out_features,
            matrix.in_features,
            schema,
            has_bias=bias is not None,
            torch_dtype=matrix.dtype,
            device=device,
        )
        self._locks = torch.zeros(LOCKS, dtype=torch.int32, device=device)
        self._forward: Any = humming_forward
        self._out_features = matrix.out_features

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        x = x.contiguous() if self._order is None else x.index_select(1, self._order)
        is_given = out is not None and out.is_contiguous()
        made = out if is_given else x.new_empty((x.shape[0], self._out_features))
        if x.shape[0]:
            self._forward(self._config, inputs=x, outputs=made, locks=self._locks, **self._tensors)
        return made if out is None or is_given else out.copy_(made)

    def error_of(self, rows: int, matrix: QuantisedMatrix, bias: torch.Tensor | None) -> float:
        """The norm of the error of a product with random rows, as a part of the product's; ``inf`` if it has NaN.

        The worst of :data:`CHECKED_OUTPUTS` outputs each, against products with :meth:`QuantisedMatrix.dequantise`.
        """
        inputs = matrix.in_features if matrix.runs is None else int(matrix.order.max()) + 1
        x = torch.randn(rows, inputs, device=matrix.codes.device).to(matrix.dtype)
        product, worst = self(x).float(), 0.0
        for start in range(0, matrix.out_features, CHECKED_OUTPUTS):
            outputs = slice(start, start + CHECKED_OUTPUTS)
            expected = x.float() @ matrix.of_outputs(outputs).dequantise().float().t()
            if bias is not None:
                expected += bias[outputs].float()
            error = float((product[:, outputs] - expected).norm() / expected.norm())
            worst = max(worst, error if error == error else float("inf"))
        return worst


def library_tensors(matrix: QuantisedMatrix, bias: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """A matrix without ``runs`` as the library takes it: int32 ``weight [out, in / 8]`` of neighbouring inputs' codes,
    ``weight_scale [out, groups]``, int32 ``zero_point [out / 8, groups]``, and the bias if there is one.

    Raises:
        ValueError: the outputs or inputs are no multiple of 8.
    """
    if matrix.out_features % CODES_PER_WORD or matrix.in_features % CODES_PER_WORD:
        raise ValueError(f"{matrix.out_features} x {matrix.in_features} has no multiple of {CODES_PER_WORD}")
    tensors = {
        "weight": _words(matrix.unpack()).t().contiguous(),
        "weight_scale": matrix.scales.t().to(matrix.dtype).contiguous(),
        "zero_point": _words(matrix.zeros.t()).contiguous(),
    }
    return tensors if bias is None else tensors | {"bias": bias}


def _words(codes: torch.Tensor) -> torch.Tensor:
    """uint8 ``[8 n, columns]`` as int32 ``[n, columns]``: bits ``4 j`` of a word are the j-th of its codes."""
    parts = codes.unflatten(0, (-1, CODES_PER_WORD))
    words = torch.zeros(parts.shape[0], parts.shape[2], dtype=torch.int32, device=codes.device)
    for j in range(CODES_PER_WORD):
        words |= parts[:, j].int() << BITS * j
    return words
