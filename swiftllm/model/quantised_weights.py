"""4-bit weights as they are read: the tensors of each format become the one layout of the kernels."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from swiftllm.model.checkpoint import StoredTensor
from swiftllm.model.quantisation import AWQ, COMPRESSED_TENSORS, GPTQ, MXFP4, QuantisationScheme
from swiftllm.model.weight_memory import Allocate, PackedTensor, write_columns, write_rows
from swiftllm.ops.matrices import BITS, CODES_PER_WORD, GROUP_MULTIPLE, MXFP4_GROUP, QuantisedMatrix, pack_codes

# -- formats -----------------------------------------------------------------------------------------------------------
# Each format's tensors of one linear module, turned into the one layout (:class:`QuantisedMatrix`).
#
# A word of eight codes holds code ``j`` in bits ``4 j`` to ``4 j + 3``. The formats differ in what the eight are:
#
# - AWQ (gemm): eight outputs, ``qweight [in, out/8]``; bits ``4 j`` hold output ``AWQ_ORDER[j]``. So does ``qzeros
#   [groups, out/8]``. ``scales [groups, out]``.
# - GPTQ: eight inputs, ``qweight [in/8, out]``. ``qzeros [groups, out/8]`` holds eight outputs: the zero point less
# one, modulo 16, in version 1, the zero point in version 2. ``scales [groups, out]``. ``g_idx [in]``: an input's group.
# - compressed-tensors (pack-quantized): eight inputs, ``weight_packed [out, in/8]``. ``weight_zero_point [out/8,
# groups]`` holds eight outputs; without it every zero point is 8. ``weight_scale [out, groups]``, ``weight_shape``, and
# with act-order ``weight_g_idx [in]``.

PIECES = 16  # of a matrix' outputs: while one is unpacked and packed anew, it takes some six times its packed bytes
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
SYMMETRIC_ZERO = 8
MXFP4_LARGEST = 254  # exponent; 255 is NaN
OUT, IN, GROUP, BYTE = "out", "in", "group", "byte"
Axis = Literal["out", "in", "group", "byte"]
AXES: Mapping[str, Mapping[str, str]] = {
    AWQ: {"qweight": "in out/8", "qzeros": "group out/8", "scales": "group out"},
    GPTQ: {"qweight": "in/8 out", "qzeros": "group out/8", "scales": "group out", "g_idx": "in"},
    COMPRESSED_TENSORS: {
        "weight_packed": "out in/8",
        "weight_scale": "out group",
        "weight_zero_point": "out/8 group",
        "weight_g_idx": "in",
        "weight_shape": "",
    },
    MXFP4: {"blocks": "out group byte", "scales": "out group"},
}
"""What the axes of each tensor of a module run over: one by one, or in words of eight. :data:`OPTIONAL`: tensors that
a module may lack."""
SCALES = ("scales", "weight_scale")
INPUT_GROUPS = ("g_idx", "weight_g_idx")
OPTIONAL = {*INPUT_GROUPS, "weight_zero_point", "weight_shape"}

Tensors = Mapping[str, torch.Tensor]


def required_tensors(scheme: QuantisationScheme) -> set[str]:
    """The tensors without which a module cannot be read."""
    needed = set(INPUT_GROUPS) if scheme.ordered else set()
    needed |= set() if scheme.symmetric else {"weight_zero_point"}
    return {name for name in AXES[scheme.method] if name not in OPTIONAL or name in needed}


def divisible_axes(scheme: QuantisationScheme) -> dict[str, tuple[Axis, ...]]:
    """The axes of each tensor, where groups count as inputs if those of a part of the inputs are a part of them."""
    adjacent = scheme.group_size is not None and not scheme.ordered
    return {
        name: tuple(IN if axis == GROUP and adjacent else axis for axis, _ in _axes(axes))
        for name, axes in AXES[scheme.method].items()
    }


def _axes(text: str) -> list[tuple[Axis, int]]:
    """From an entry of :data:`AXES`, with how many of each axis an element holds."""
    return [(axis, int(held or 1)) for axis, _, held in (word.partition("/") for word in text.split())]


@dataclass(frozen=True)
class StoredMatrix:
    """A module's matrix whose codes are still packed as in the checkpoint. They are unpacked for some outputs at a
    time, since unpacked codes take twice the memory. The fields are those of
    :class:`~swiftllm.ops.matrices.QuantisedMatrix`."""

    out_features: int
    in_features: int
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group_size: int
    dtype: torch.dtype
    order: torch.Tensor | None
    runs: torch.Tensor | None
    codes_of: Callable[[slice], torch.Tensor]
    """From outputs to their codes, uint8 ``[in, outputs]``; a slice starts at a multiple of eight."""

    def pieces(self) -> Iterator[tuple[int, torch.Tensor]]:
        """The matrix' words, a few outputs at a time: the first output, int32 ``[16 * blocks, outputs]``."""
        step = CODES_PER_WORD * -(-self.out_features // (PIECES * CODES_PER_WORD))
        for first in range(0, self.out_features, step):
            yield first, pack_codes(self.codes_of(slice(first, min(first + step, self.out_features))))

    def scaled(self, factor: float) -> StoredMatrix:
        """The matrix times ``factor``, in MXFP4 a power of two."""
        if self.zeros is None:
            exponents = self.scales.int() + round(math.log2(factor))
            return replace(self, scales=exponents.clamp_(0, MXFP4_LARGEST).to(torch.uint8))
        return replace(self, scales=self.scales * factor)

    def with_heads_ordered(self, order: torch.Tensor) -> StoredMatrix:
        """The outputs of each head in another order: the first is ``order[0]`` of them; int64 ``[head_dim]``."""
        head_dim, order = len(order), order.to(self.scales.device)

        def ordered(columns: torch.Tensor) -> torch.Tensor:
            return columns.unflatten(-1, (-1, head_dim))[..., order].flatten(-2)

        def codes_of(outputs: slice) -> torch.Tensor:
            first = outputs.start // head_dim * head_dim
            stored_first = first // CODES_PER_WORD * CODES_PER_WORD
            last = -(-outputs.stop // head_dim) * head_dim
            heads = ordered(self.codes_of(slice(stored_first, last))[:, first - stored_first :])
            return heads[:, outputs.start - first : outputs.stop - first]

        zeros = None if self.zeros is None else ordered(self.zeros)
        return replace(self, scales=ordered(self.scales), zeros=zeros, codes_of=codes_of)


def open_matrix(
    scheme: QuantisationScheme,
    tensors: Tensors,
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
    whole_in_features: int | None = None,
) -> StoredMatrix:
    """A module's matrix from its ``tensors``, by their names in the checkpoint without the module's.

    All tensors lie on the device where the matrix is wanted. ``dtype`` is that of its elements. Of a part of a
    module's inputs the tensors are as :func:`divisible_axes` tells, ``in_features`` is its size, and
    ``whole_in_features`` the module's.

    Raises:
        ValueError: groups do not divide the inputs, or a tensor has another shape than the format tells; the message
            names the tensor.
    """
    grouped_inputs, is_part = in_features, False
    if whole_in_features not in (None, in_features) and scheme.ordered and scheme.group_size is not None:
        grouped_inputs, is_part = whole_in_features, True
    group_size = scheme.group_size_of(grouped_inputs)
    _check_shapes(scheme, tensors, out_features, in_features, grouped_inputs // group_size)
    scales, zeros, g_idx = _per_group(scheme, tensors, out_features)
    in_own_order, runs = _codes_of(scheme, tensors), None
    if is_part:
        assert g_idx is not None and zeros is not None  # both formats with act-order have them
        wanted = g_idx.long()
        empty, order, runs = sort_into_runs(in_own_order(slice(0, 0)), zeros[:, :0], wanted)
        in_features = len(empty)

        def codes_of(outputs: slice) -> torch.Tensor:
            return sort_into_runs(in_own_order(outputs), zeros[:, outputs], wanted)[0]

    elif (order := input_order(g_idx, group_size)) is not None:
        order = order.int()

        def codes_of(outputs: slice) -> torch.Tensor:
            return in_own_order(outputs).index_select(0, order)

    else:

        def codes_of(outputs: slice) -> torch.Tensor:
            return in_own_order(outputs)

    return StoredMatrix(out_features, in_features, scales, zeros, group_size, dtype, order, runs, codes_of)


def _per_group(
    scheme: QuantisationScheme, tensors: Tensors, out_features: int
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Scales ``[groups, out]``, zero points uint8 ``[groups, out]``, None in MXFP4, and the groups of the inputs."""
    if scheme.method == AWQ:
        return tensors["scales"], unpack_columns(tensors["qzeros"], AWQ_ORDER)[:, :out_features], None
    if scheme.method == GPTQ:
        stored = unpack_columns(tensors["qzeros"])[:, :out_features]
        zeros = stored.add_(zero_offset(scheme, stored)).bitwise_and_(15)
        return tensors["scales"], zeros, tensors.get("g_idx")
    if scheme.method == MXFP4:
        if bool((tensors["scales"] > MXFP4_LARGEST).any()):
            raise ValueError("scales hold NaN: the checkpoint is damaged, download it again")
        return tensors["scales"].t(), None, None
    scales, packed = tensors["weight_scale"].t(), tensors.get("weight_zero_point")
    if packed is None:
        zeros = torch.full_like(scales, SYMMETRIC_ZERO, dtype=torch.uint8)
    else:
        zeros = unpack_columns(packed.t())[:, :out_features]
    return scales, zeros, tensors.get("weight_g_idx")


def _codes_of(scheme: QuantisationScheme, tensors: Tensors) -> Callable[[slice], torch.Tensor]:
    """See :attr:`StoredMatrix.codes_of`; the inputs are in their own order."""
    if scheme.method == AWQ:

        def of_awq(outputs: slice) -> torch.Tensor:
            words = slice(outputs.start // CODES_PER_WORD, -(-outputs.stop // CODES_PER_WORD))
            return unpack_columns(tensors["qweight"][:, words], AWQ_ORDER)[:, : outputs.stop - outputs.start]

        return of_awq
    if scheme.method == GPTQ:
        return lambda outputs: unpack_columns(tensors["qweight"][:, outputs].t()).t()
    if scheme.method == MXFP4:

        def of_mxfp4(outputs: slice) -> torch.Tensor:
            blocks = tensors["blocks"][outputs]
            return torch.stack((blocks & 15, blocks >> BITS), -1).flatten(1).t()

        return of_mxfp4
    return lambda outputs: unpack_columns(tensors["weight_packed"][outputs]).t()


def unpack_columns(words: torch.Tensor, order: tuple[int, ...] = tuple(range(CODES_PER_WORD))) -> torch.Tensor:
    """uint8 ``[rows, 8 words]`` from int32 ``[rows, words]``; bits ``4 j`` of a word hold its column ``order[j]``."""
    codes = torch.empty(*words.shape, CODES_PER_WORD, dtype=torch.uint8, device=words.device)
    for j, column in enumerate(order):
        codes[..., column] = (words >> BITS * j) & 15
    return codes.flatten(-2)


def zero_offset(scheme: QuantisationScheme, stored: torch.Tensor) -> int:
    """What is to be added to GPTQ's stored zero points.

    Checkpoints are labelled with the wrong version. Where all zero points are the same 7 or 8 and the scheme is
    symmetric, that tells the version: the zero point must be 8.
    """
    if scheme.symmetric:
        for offset in (1, 0):
            if bool((stored == SYMMETRIC_ZERO - offset).all()):
                return offset
    return scheme.zero_offset


def input_order(g_idx: torch.Tensor | None, group_size: int) -> torch.Tensor | None:
    """int64 ``[in]``: the inputs sorted by their groups; None: they are already."""
    if g_idx is None:
        return None
    wanted = torch.arange(len(g_idx), device=g_idx.device) // group_size
    num_groups = len(g_idx) // group_size
    found = g_idx.long()
    found = found - found.min() // num_groups * num_groups  # of a part, the first group has another number than 0
    if torch.equal(found, wanted):
        return None
    order = torch.argsort(found, stable=True)
    if not torch.equal(found[order], wanted):
        raise ValueError(f"g_idx does not put {group_size} inputs into each group: the checkpoint is damaged")
    return order


def sort_into_runs(
    codes: torch.Tensor, zeros: torch.Tensor, groups: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs of any groups, sorted by these and filled up to whole runs with elements that are 0.

    ``codes``: uint8 ``[in, out]``; ``zeros``: uint8 ``[groups, out]``; ``groups``: int64 ``[in]``. Returns the sorted
    codes, and ``order`` and ``runs`` of :class:`~swiftllm.ops.matrices.QuantisedMatrix`.
    """
    if not bool(((groups >= 0) & (groups < len(zeros))).all()):
        raise ValueError(f"g_idx names a group beyond the {len(zeros)} that there are: the checkpoint is damaged")
    order = torch.argsort(groups, stable=True)
    sizes = torch.bincount(groups, minlength=len(zeros))
    num_runs = (sizes + GROUP_MULTIPLE - 1) // GROUP_MULTIPLE
    added_before = GROUP_MULTIPLE * (num_runs.cumsum(0) - num_runs) - (sizes.cumsum(0) - sizes)
    places = torch.arange(len(order), device=order.device) + added_before[groups[order]]
    runs = torch.arange(len(zeros), device=order.device).repeat_interleave(num_runs)
    sorted_codes = zeros[runs.repeat_interleave(GROUP_MULTIPLE)]
    sorted_codes[places] = codes[order]
    padded_order = order.new_zeros(len(sorted_codes))
    padded_order[places] = order
    return sorted_codes, padded_order.int(), runs.int()


def _check_shapes(
    scheme: QuantisationScheme, tensors: Tensors, out_features: int, in_features: int, groups: int
) -> None:
    sizes = {OUT: out_features, IN: in_features, GROUP: groups, BYTE: MXFP4_GROUP // 2}
    for name, axes in AXES[scheme.method].items():
        shape = [-(-sizes[axis] // held) for axis, held in _axes(axes)]
        if shape and name in tensors and list(tensors[name].shape) != shape:
            raise ValueError(f"{name} has shape {list(tensors[name].shape)}, {scheme.describe()} asks for {shape}")


# -- fused matrices ----------------------------------------------------------------------------------------------------
# A fused matrix of a quantised model. Its parts are written where they stay, as they come: there is no second copy.

Made = torch.Tensor | PackedTensor | QuantisedMatrix


@dataclass
class FusedTarget:
    """Where a fused matrix goes. The sizes are those of the rank's part, but for ``whole_in_features``."""

    modules: Mapping[str, int]
    """From top to bottom, with their outputs."""
    in_features: int
    whole_in_features: int
    allocate: Allocate
    put: Callable[[Made | tuple[Made, ...]], None]
    """Takes the matrix; a tuple, if its modules do not fit together."""
    device: torch.device | str
    """Where tensors wait for the others of their module."""
    kinds: dict[str, set[object]] = field(default_factory=lambda: defaultdict(set))
    """What decides whether a module's outputs can lie beside its neighbours', as it is known before they come."""
    _made: dict[str, Made] = field(default_factory=dict)
    _num_written: int = 0

    def add(self, module: str, part: torch.Tensor | StoredMatrix) -> None:
        """Write a module's matrix beside the others, or by itself if they do not fit together; the last one puts
        all."""
        names = list(self.modules)
        fit = len({frozenset(self.kinds[name]) for name in names}) == 1
        beside = names if fit else [module]
        name, first = beside[0], sum(self.modules[other] for other in beside[: beside.index(module)])
        if name not in self._made:
            out_features = sum(self.modules[other] for other in beside)
            self._made[name] = _memory_for(part, out_features, self.allocate)
        _write(self._made[name], first, part)
        self._num_written += 1
        if self._num_written == len(names):
            made, self._made = self._made, {}
            self.put(made[names[0]] if fit else tuple(made[name] for name in names))

    def empty(
        self, scheme: QuantisationScheme, dtype: torch.dtype, scale_dtype: torch.dtype
    ) -> Made | tuple[Made, ...]:
        """Memory without content, as a checkpoint's matrix has: for dummy weights and estimates of memory. Its modules
        that are not quantised have ``dtype``; if others are, all are apart."""
        in_16_bits = [scheme.keeps_16_bits(module) for module in self.modules]
        sizes = list(self.modules.values())
        if len(set(in_16_bits)) == 1:
            in_16_bits, sizes = in_16_bits[:1], [sum(sizes)]
        made = [
            self.allocate((size, self.in_features), dtype=dtype)
            if is_plain
            else self._empty_packed(scheme, size, dtype, scale_dtype)
            for is_plain, size in zip(in_16_bits, sizes, strict=True)
        ]
        return made[0] if len(made) == 1 else tuple(made)

    def _empty_packed(
        self, scheme: QuantisationScheme, out_features: int, dtype: torch.dtype, scale_dtype: torch.dtype
    ) -> QuantisedMatrix:
        """With act-order, a part of the inputs has some of each group. How many is random: each group's are taken to be
        filled up to whole runs by half a run."""
        whole = self.whole_in_features
        if self.in_features == whole or not scheme.ordered or scheme.group_size is None:
            group_size = scheme.group_size_of(self.in_features)
            sizes = self.in_features, self.in_features // group_size, group_size
            own_dtype = torch.uint8 if scheme.method == MXFP4 else scale_dtype
            return QuantisedMatrix.allocate(self.allocate, out_features, *sizes, dtype, own_dtype)
        num_groups = whole // scheme.group_size_of(whole)
        num_runs = -(-(self.in_features + num_groups * GROUP_MULTIPLE // 2) // GROUP_MULTIPLE)
        in_features = num_runs * GROUP_MULTIPLE
        order = torch.arange(in_features, dtype=torch.int32, device=self.device) % self.in_features
        runs = torch.arange(num_runs, dtype=torch.int32, device=self.device) * num_groups // num_runs
        sizes = in_features, num_groups, scheme.group_size
        return QuantisedMatrix.allocate(self.allocate, out_features, *sizes, dtype, scale_dtype, order, runs)


def _memory_for(part: torch.Tensor | StoredMatrix, out_features: int, allocate: Allocate) -> Made:
    """Memory of so many outputs of the kind of ``part``, which are to be written."""
    if isinstance(part, torch.Tensor):
        return allocate((out_features, part.shape[1]), dtype=part.dtype)

    def copied(tensor: torch.Tensor | None) -> torch.Tensor | PackedTensor | None:
        if tensor is None:
            return None
        own = allocate(tensor.shape, dtype=tensor.dtype)
        write_rows(own, 0, tensor)
        return own

    sizes = part.in_features, len(part.scales), part.group_size
    dtypes, inputs = (part.dtype, part.scales.dtype), (copied(part.order), copied(part.runs))
    return QuantisedMatrix.allocate(allocate, out_features, *sizes, *dtypes, *inputs)


def _write(matrix: Made, first: int, part: torch.Tensor | StoredMatrix) -> None:
    """Put a part's outputs at output ``first``."""
    if isinstance(part, torch.Tensor):
        assert not isinstance(matrix, QuantisedMatrix)
        write_rows(matrix, first, part)
        return
    assert isinstance(matrix, QuantisedMatrix)
    for start, words in part.pieces():
        write_columns(matrix.codes, first + start, words)
    write_columns(matrix.scales, first, part.scales)
    if part.zeros is not None and matrix.zeros is not None:
        write_columns(matrix.zeros, first, part.zeros)


# -- collecting the tensors of modules ---------------------------------------------------------------------------------
# Collects the tensors of quantised modules as they are read, and makes a matrix of each as soon as it is complete.


class QuantisedCollector:
    """Takes a checkpoint's tensors one by one. A module's tensors wait on its device, packed, for the last of them."""

    def __init__(
        self,
        scheme: QuantisationScheme,
        targets: list[FusedTarget],
        dtype: torch.dtype,
        slices: Callable[..., tuple[slice, ...]],
        fold: Callable[[str, torch.Tensor | StoredMatrix], torch.Tensor | StoredMatrix],
    ) -> None:
        """``dtype``: of activations, and of matrices that are not quantised. ``slices``: the part that is wanted of a
        tensor, see :meth:`swiftllm.model.weights.ModelPart.slices`. ``fold``: what is done to a module's
        matrix."""
        self._scheme, self._dtype, self._slices, self._fold = scheme, dtype, slices, fold
        self._axes = {**divisible_axes(scheme), "weight": (OUT, IN)}
        self._targets = {module: target for target in targets for module in target.modules}
        self._required = required_tensors(scheme)
        self._made: set[str] = set()
        self._waiting: dict[str, dict[str, torch.Tensor]] = {}

    def look_ahead(self, name: str, stored: StoredTensor) -> None:
        """Note what of a tensor decides whether its module's matrix can lie beside its neighbours'; before
        :meth:`take` takes the first tensor of any module."""
        module, _, kind = name.rpartition(".")
        target = self._targets.get(module)
        if target is None or len(target.modules) == 1:
            return
        if kind in INPUT_GROUPS:
            target.kinds[module].add(hash(bytes(stored[(slice(None),)].numpy())))
        elif kind in SCALES:
            target.kinds[module].add(stored.get_dtype())
        elif kind == "weight":
            target.kinds[module].add(kind)

    def take(self, name: str, stored: StoredTensor) -> bool:
        """Take what is wanted of a tensor of the checkpoint; False: it belongs to no matrix.

        Raises:
            ValueError: it does not have the shape that config.json tells, or is a scale that is not finite.
        """
        module, _, kind = name.rpartition(".")
        target = self._targets.get(module)
        if target is None or kind not in self._axes:
            return False
        if module in self._made:
            return kind in OPTIONAL  # the matrix could be made without it
        tensor = stored[self._slices(name, stored.get_shape(), self._axes[kind])]
        if kind == "weight":
            shape = [target.modules[module], target.in_features]
            if list(tensor.shape) != shape:
                raise ValueError(f"{name} has shape {list(tensor.shape)}, config.json asks for {shape}")
            self._made.add(module)
            target.add(module, self._fold(module, tensor.to(target.device, self._dtype)))
            return True
        if kind in SCALES and not bool(torch.isfinite(tensor).all()):  # every token would be 0, without an error
            raise ValueError(f"{name} holds NaN or infinity: the checkpoint is damaged, download it again")
        tensors = self._waiting.setdefault(module, {})
        tensors[kind] = tensor.to(target.device)
        if self._required <= tensors.keys():
            del self._waiting[module]
            try:
                sizes = target.modules[module], target.in_features
                matrix = open_matrix(self._scheme, tensors, *sizes, self._dtype, target.whole_in_features)
            except ValueError as error:
                raise ValueError(f"{module}: {error}") from None
            self._made.add(module)
            target.add(module, self._fold(module, matrix))
        return True

    def missing(self) -> list[str]:
        """Names of tensors that never came."""
        names = []
        for module in self._targets.keys() - self._made:
            kinds = self._required - self._waiting.get(module, {}).keys()
            names += [f"{module}.{kind}" for kind in kinds]
        return names
