"""Park and Egger's split of a decoder layer: which of its operations the CPU computes while the rest crosses PCIe.

Equations are those of section 4.2. Operations are in the order of a layer. The CPU has those before ``i`` and from
``j`` on, the GPU those between, whose weights and KV cache are sent to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Operation:
    """An operation of a layer: seconds for one batch on the CPU, over PCIe, to decompress, and on the GPU.

    ``kv_s`` is the part of ``host_to_device_s`` that each batch sends of its own: its KV cache.
    """

    name: str
    cpu_s: float
    host_to_device_s: float
    decompress_s: float = 0.0
    gpu_s: float = 0.0
    kv_s: float = 0.0


@dataclass(frozen=True)
class Split:
    """A split and its times; operations ``[i, j)`` are the GPU's."""

    i: int
    j: int
    cpu_s: float
    host_to_device_s: float
    decompress_s: float

    @property
    def latency_s(self) -> float:
        """L of a layer, equations 5 and 9."""
        return max(self.cpu_s, self.host_to_device_s, self.decompress_s)


def split_at(operations: Sequence[Operation], i: int, j: int, batches: int = 1) -> Split:
    """Equations 6 to 8 for a batch, equation 14 for several: weights are sent once, KV cache for each batch.

    The CPU computes, and the GPU decompresses KV cache, once for each batch.
    """
    own, others = operations[i:j], [*operations[:i], *operations[j:]]
    sent_s = sum(op.host_to_device_s for op in own) + (batches - 1) * sum(op.gpu_s + op.kv_s for op in own)
    decompress_s = sum(op.decompress_s * (batches if op.kv_s else 1) for op in own)
    first_s = next((op.host_to_device_s for op in own if op.decompress_s), 0.0)
    return Split(
        i, j, batches * sum(op.cpu_s for op in others), sent_s, decompress_s + first_s if decompress_s else 0.0
    )


def single_splits(operations: Sequence[Operation], batches: int = 1) -> list[Split]:
    """The CPU computes the first 0, 1, 2, ... operations (Fig. 14); the first entry is GPU-only."""
    return [split_at(operations, i, len(operations), batches) for i in range(len(operations))]


def best_split(operations: Sequence[Operation], batches: int = 1) -> Split:
    """Of all one or two split points (equation 13), the one of the lowest latency, then of the best balance."""

    def key(split: Split) -> tuple[float, float]:
        return split.latency_s, abs(split.cpu_s - split.host_to_device_s)

    return min(_splits(operations, batches), key=key)


def _splits(operations: Sequence[Operation], batches: int) -> Iterator[Split]:
    for i in range(len(operations)):
        for j in range(i + 1, len(operations) + 1):
            yield split_at(operations, i, j, batches)


def in_pieces(operations: Sequence[Operation], name: str, pieces: int) -> list[Operation]:
    """An operation divided into equal pieces (section 3.2), each of which may be on the other side of a split."""
    divided: list[Operation] = []
    for op in operations:
        if op.name != name:
            divided.append(op)
            continue
        times = ("cpu_s", "host_to_device_s", "decompress_s", "gpu_s", "kv_s")
        piece = replace(op, **{time: getattr(op, time) / pieces for time in times})
        divided += [replace(piece, name=f"{name}.{k}") for k in range(pieces)]
    return divided
