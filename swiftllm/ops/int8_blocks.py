"""int8 codes of whole KV blocks, by torch: the slow twin of pacpu's and Triton's; :mod:`pacpu.int8` has the layout."""

from __future__ import annotations

import torch

from pacpu import int8

TILE = int8.TILE_TOKENS


def codes_and_scales(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int8 ``[..., head_dim]`` and scales float32 ``[...]`` of rows."""
    largest = x.float().abs().amax(-1)
    scales = torch.clamp(largest * torch.tensor(1 / 127, dtype=torch.float32), min=2.0**-23)
    scales = ((scales.view(torch.int32) + 0x80) & ~0xFF).view(torch.float32)
    scales = torch.where(largest.isfinite(), scales, torch.nan)
    codes = (x.float() * (1 / scales)[..., None]).round()
    return torch.where(scales.isfinite()[..., None], codes, 0).to(torch.int8), scales


def pack(blocks: torch.Tensor) -> torch.Tensor:
    """Blocks ``[..., 2, block_size, head_dim]`` as uint8 ``[..., head_bytes]``."""
    codes, scales = codes_and_scales(blocks)
    *outer, _, block_size, head_dim = codes.shape
    tiles = block_size // TILE
    keys, values = codes.unbind(-3)
    keys = (keys.int() + 128).to(torch.uint8).view(*outer, tiles, TILE, head_dim // 4, 4).transpose(-3, -2)
    values = values.reshape(*outer, tiles, 4, 4, head_dim).transpose(-2, -1).contiguous().view(torch.uint8)
    scales = scales.view(*outer, 2, tiles, TILE).transpose(-3, -2).contiguous().view(torch.uint8)
    parts = [part.reshape(*outer, tiles, -1) for part in (keys, values, scales)]
    return torch.cat(parts, -1).view(*outer, int8.head_bytes(block_size, head_dim))


def unpack(blocks: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The reverse of :func:`pack`, in float32."""
    *outer, _ = blocks.shape
    tiles = blocks.view(*outer, -1, int8.tile_bytes(head_dim))
    keys, values, scales = tiles.split([TILE * head_dim, TILE * head_dim, 8 * TILE], -1)
    keys = keys.reshape(*tiles.shape[:-1], head_dim // 4, TILE, 4).transpose(-3, -2).flatten(-2).float() - 128
    values = values.contiguous().view(torch.int8).view(*tiles.shape[:-1], 4, head_dim, 4).transpose(-2, -1)
    values = values.flatten(-3, -2).float()
    scales = scales.contiguous().view(torch.float32).view(*tiles.shape[:-1], 2, TILE, 1)
    both = torch.stack([keys, values], -3) * scales  # [..., tiles, 2, 16, head_dim]
    return both.transpose(-4, -3).flatten(-3, -2)
