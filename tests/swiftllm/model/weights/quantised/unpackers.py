"""What the formats mean, written from their descriptions, element by element; shares nothing with the readers."""

from __future__ import annotations

import numpy as np
import torch


def nibble(words: np.ndarray, row: int, column: int, position: int) -> int:
    """The four bits at ``4 * position`` of a word."""
    return int(np.uint32(words[row, column]) >> np.uint32(4 * position)) & 0xF


def awq(tensors: dict[str, torch.Tensor], group_size: int) -> torch.Tensor:
    """AutoAWQ's gemm layout: the eight outputs of a word lie in the nibbles 0 4 1 5 2 6 3 7, from the first on."""
    qweight, qzeros = tensors["qweight"].numpy(), tensors["qzeros"].numpy()
    nibbles = [0, 4, 1, 5, 2, 6, 3, 7]

    def element(out: int, i: int) -> tuple[int, int]:
        word, place = out // 8, nibbles[out % 8]
        return nibble(qweight, i, word, place), nibble(qzeros, i // group_size, word, place)

    return dequantised(tensors["scales"], element, lambda i: i // group_size, qweight.shape[0])


def gptq(tensors: dict[str, torch.Tensor], plus_one: bool) -> torch.Tensor:
    """AutoGPTQ's layout: words of eight inputs, zero points in words of eight outputs, groups by ``g_idx``."""
    qweight, qzeros, g_idx = (tensors[name].numpy() for name in ("qweight", "qzeros", "g_idx"))

    def element(out: int, i: int) -> tuple[int, int]:
        zero = nibble(qzeros, int(g_idx[i]), out // 8, out % 8)
        return nibble(qweight, i // 8, out, i % 8), (zero + 1) % 16 if plus_one else zero

    return dequantised(tensors["scales"], element, lambda i: int(g_idx[i]), 8 * qweight.shape[0])


def compressed_tensors(tensors: dict[str, torch.Tensor], group_size: int) -> torch.Tensor:
    """pack-quantized: signed numbers plus eight, in words of eight inputs; zero points likewise, of eight outputs."""
    packed = tensors["weight_packed"].numpy()
    zero_words = tensors["weight_zero_point"].numpy() if "weight_zero_point" in tensors else None
    in_features = tensors["weight_shape"][1].item()
    g_idx = tensors.get("weight_g_idx", torch.arange(in_features) // group_size).tolist()

    def element(out: int, i: int) -> tuple[int, int]:
        signed = nibble(packed, out, i // 8, i % 8) - 8
        zero = 0 if zero_words is None else nibble(zero_words, out // 8, g_idx[i], out % 8) - 8
        return signed, zero

    return dequantised(tensors["weight_scale"].t(), element, lambda i: g_idx[i], in_features)


def dequantised(scales: torch.Tensor, element, group_of, in_features: int) -> torch.Tensor:
    """float32 ``[out, in]`` of ``(code - zero) * scale``."""
    scales = scales.float().numpy()
    out_features = scales.shape[1]
    matrix = np.empty((out_features, in_features), np.float32)
    for out in range(out_features):
        for i in range(in_features):
            code, zero = element(out, i)
            matrix[out, i] = np.float32(code - zero) * scales[group_of(i), out]
    return torch.from_numpy(matrix)
