"""Host memory while a model is loaded whose weights are not all on the device."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from quantise import write_folder
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import _disable_current_modes

from swiftllm.config import EngineConfig
from swiftllm.device import HostDevice
from swiftllm.model import stages, weights
from swiftllm.model.config import ModelConfig
from swiftllm.model.placement import Place, Placement
from swiftllm.model.stages import open_weights
from swiftllm.model.weight_memory import in_chunks
from swiftllm.model.weights import fused_matrices
from swiftllm.ops.cpu import CpuOps
from swiftllm.ops.interface import Linear, Ops
from swiftllm.runtime.memory import stage_bytes, weight_bytes
from tests.reference.counted_memory import CountedMemory
from tests.reference.tiny_model import make_tiny_llama

LAYERS = 4
WIDE = {"hidden_size": 256, "intermediate_size": 768}
LAYOUTS = {  # layout, symmetric, act-order
    "awq": ("awq", False, False),
    "gptq act-order": ("gptq", False, True),
    "gptq act-order, one for all": ("gptq", False, True),
    "compressed-tensors": ("compressed-tensors", True, False),
}
CHUNK_BYTES = 10_000


class StreamWithoutSlots:
    """Its slots take no memory."""

    def __init__(self, device: HostDevice, chunks: dict[int, list[torch.Tensor]]) -> None:
        self.chunks = chunks

    def slot_of(self, stage: int) -> torch.Tensor:
        return torch.empty(sum(map(len, self.chunks[stage])), dtype=torch.uint8, device="meta")


@pytest.fixture(scope="module")
def model_dir(tiny_model_dir) -> Path:
    return tiny_model_dir(num_hidden_layers=LAYERS, vocab_size=64)


def counted_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading makes tensors that the counter sees, as it does on the heap."""

    def read(folder: Path, real=weights.read_tensors) -> Iterator[tuple[str, Any]]:
        for name, tensor in real(folder):
            yield name, CountedSlice(tensor)

    monkeypatch.setattr(weights, "read_tensors", read)


class CountedSlice:
    def __init__(self, tensor: Any) -> None:
        self.get_shape, self.get_dtype, self._tensor = tensor.get_shape, tensor.get_dtype, tensor

    def __getitem__(self, index: Any) -> torch.Tensor:
        with _disable_current_modes():
            mapped = self._tensor[index]
        return mapped.clone()


class Packs:
    """Keeps a copy of each matrix, as pacpu does."""

    def make_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        packed = weight.clone()
        return lambda x, out=None: F.linear(x, packed, bias)


@pytest.mark.parametrize("place", [Place.STREAMED, Place.CPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_more_than_two_tensors_beside_what_stays(model_dir, monkeypatch, place, dtype):
    """All stages are streamed, or the CPU's. The other tensors would be on a device; here they count too."""
    monkeypatch.setattr(stages, "CHUNK_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(stages, "WeightSlots", StreamWithoutSlots)
    counted_files(monkeypatch)
    model = ModelConfig.from_folder(model_dir)
    placement = Placement((place,) * (LAYERS + 1))
    config, device = EngineConfig(str(model_dir)), HostDevice()
    with CountedMemory("cpu") as memory:
        provider = open_weights(config, model, dtype, Ops(), placement, device, Packs())
        peak = memory.peak
    # The largest tensors of the file, which has 32 bits: gate, up, down. Gate and up are one matrix.
    largest = 4 * max(max(matrix.out_features) * matrix.in_features for matrix in fused_matrices(model))
    stays = weight_bytes(model, dtype)
    assert stays <= peak <= stays + 2 * largest
    if dtype is torch.float32:
        assert max(stage_bytes(model, dtype)) > 2 * largest, "a whole stage would not be noticed"
    del provider


@pytest.mark.parametrize("place", [Place.RESIDENT, Place.STREAMED, Place.CPU])
@pytest.mark.parametrize("name", LAYOUTS)
def test_no_more_than_two_4_bit_tensors_beside_what_stays(tmp_path, monkeypatch, place, name) -> None:
    """As above with 4-bit weights: parts of a fused matrix are packed where they stay, a few outputs at a time."""
    monkeypatch.setattr(stages, "CHUNK_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(stages, "WeightSlots", StreamWithoutSlots)
    source = make_tiny_llama(tmp_path / "plain", num_hidden_layers=2, vocab_size=64, **WIDE)
    if name.endswith("one for all"):
        file = source / "model.safetensors"
        uneven = {name: x * (1 + 99 * (torch.arange(x.shape[-1]) % 2)) for name, x in load_file(file).items()}
        save_file(uneven, file, {"format": "pt"})
    layout, symmetric, act_order = LAYOUTS[name]
    write_folder(source, tmp_path / "packed", layout, 128, symmetric, act_order)
    counted_files(monkeypatch)
    model = ModelConfig.from_folder(tmp_path / "packed")
    places = [place] * 3 if place is not Place.RESIDENT else [Place.STREAMED, *[place] * 2]  # not all resident
    config, device = EngineConfig(str(tmp_path / "packed")), HostDevice()
    with CountedMemory("cpu") as memory:
        provider = open_weights(config, model, torch.float32, Ops(), Placement(tuple(places)), device, CpuOps())
        peak = memory.peak
    matrices = fused_matrices(model)  # 4 bits of code, 16 of scale, 8 of zero point; 32 of each input's place
    largest = max(max(m.out_features) * m.in_features * (4 + 24 / 128) / 8 + 4 * m.in_features for m in matrices)
    stays = weight_bytes(model, torch.float32)
    assert stays * 0.9 <= peak <= stays + 2 * largest
    del provider


def test_rows_of_a_packed_tensor_go_where_they_belong():
    seed = random.randrange(1 << 32)
    print("seed", seed)
    draw = random.Random(seed)
    for _ in range(20):
        sizes = [draw.randrange(1, 9) for _ in range(draw.randrange(1, 4))]
        width, chunk_bytes = draw.randrange(1, 9), draw.randrange(1, 70)
        packed = in_chunks(lambda n: torch.full((n,), 255, dtype=torch.uint8), chunk_bytes)(
            (sum(sizes), width), torch.float32
        )
        expected = torch.randn(sum(sizes), width, dtype=torch.float64)
        views = list(zip(packed.split(sizes), expected.split(sizes), strict=True))
        draw.shuffle(views)
        for view, rows in views:
            middle = draw.randrange(len(rows) + 1)
            view.write(middle, rows[middle:])
            view.write(0, rows[:middle])
        in_one_piece = torch.cat(packed.chunks)
        assert len(in_one_piece) % 256 == 0 and in_one_piece[packed.nbytes :].count_nonzero() == 0
        assert torch.equal(in_one_piece[: packed.nbytes].view(torch.float32).view(-1, width), expected.float())
        assert max(map(len, packed.chunks)) <= chunk_bytes
