#!/usr/bin/env python3
"""Write a model folder again with 4-bit weights, in the layout of AWQ, GPTQ or compressed-tensors.

    scripts/quantise.py MODEL FOLDER --format awq --group-size 64

Weights are rounded to the nearest of 16 values of their group. No data is used, so the model loses more than by the
methods after which the layouts are named; take their checkpoints where there are any. Embeddings, vocabulary matrix
and norms keep their dtype. `--format dequantised` writes the rounded weights in 32 bits, to judge by.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__" and not __package__:  # run as a file
    NEEDS = ("numpy", "torch", "safetensors")
    import here

import torch
from safetensors.torch import save_file

from swiftllm.model.checkpoint import read_file
from swiftllm.model.folder import INDEX, TEXT_FILES, read_object, weight_files

MODULES = ("_proj", ".w1", ".w2", ".w3")  # the ends of their names; the last are those of Mixtral's experts
FORMATS = ("awq", "gptq", "gptq-v2", "compressed-tensors", "dequantised")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output in bits 4 j of a word of eight
LEVELS = 15


class Quantised(NamedTuple):
    """A matrix ``[out, in]`` as ``(codes - zeros) * scales``."""

    codes: torch.Tensor
    """uint8 ``[in, out]``."""
    scales: torch.Tensor
    """float16 ``[groups, out]``."""
    zeros: torch.Tensor
    """uint8 ``[groups, out]``."""
    g_idx: torch.Tensor
    """int32 ``[in]``: the group of each input."""

    def dequantise(self) -> torch.Tensor:
        """float32 ``[out, in]``."""
        groups = self.g_idx.long()
        return ((self.codes.float() - self.zeros.float()[groups]) * self.scales.float()[groups]).t().contiguous()


def quantise(weight: torch.Tensor, group_size: int, symmetric: bool, act_order: bool) -> Quantised:
    """Round ``weight [out, in]`` to the nearest codes. ``act_order``: the inputs with the largest weights share groups.

    Raises:
        ValueError: groups do not divide the inputs.
    """
    out_features, in_features = weight.shape
    if in_features % group_size:
        raise ValueError(f"groups of {group_size} do not divide {in_features} inputs: take a --group-size that does")
    weight = weight.float()
    order = torch.arange(in_features)
    if act_order:
        order = weight.square().sum(0).argsort(descending=True, stable=True)
    groups = weight[:, order].view(out_features, -1, group_size)
    if symmetric:
        scales = groups.abs().amax(-1) / (LEVELS / 2)
    else:
        scales = (groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0)) / LEVELS
    scales = scales.half()
    scales[scales == 0] = 1
    wide = scales.float()
    zeros = torch.full_like(wide, 8) if symmetric else (-groups.amin(-1).clamp(max=0) / wide).round().clamp(0, LEVELS)
    codes = (groups / wide[..., None] + zeros[..., None]).round().clamp(0, LEVELS).to(torch.uint8)
    in_place = torch.empty(in_features, out_features, dtype=torch.uint8)
    in_place[order] = codes.flatten(1).t()
    g_idx = torch.empty(in_features, dtype=torch.int32)
    g_idx[order] = torch.arange(in_features, dtype=torch.int32) // group_size
    return Quantised(in_place, scales.t().contiguous(), zeros.to(torch.uint8).t().contiguous(), g_idx)


def pack_columns(codes: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """int32 words ``[rows, columns / 8]`` of ``codes [rows, columns]``: bits 4 j hold column ``order[j]`` of eight.

    Missing columns of the last word are 0.
    """
    rows, columns = codes.shape
    padded = torch.zeros(rows, columns + -columns % 8, dtype=torch.int32)
    padded[:, :columns] = codes
    words = torch.zeros(rows, padded.shape[1] // 8, dtype=torch.int32)
    for j, column in enumerate(order):
        words |= padded[:, column::8] << 4 * j
    return words


def pack(matrix: Quantised, layout: str, symmetric: bool, act_order: bool) -> dict[str, torch.Tensor]:
    """The tensors of a module in a layout, by their names without the module's."""
    codes, scales, zeros, g_idx = matrix
    if layout == "dequantised":
        return {"weight": matrix.dequantise()}
    if layout == "awq":
        if codes.shape[1] % 8:
            raise ValueError(f"AWQ packs eight outputs, and there are {codes.shape[1]}: take another --format")
        return {
            "qweight": pack_columns(codes, AWQ_ORDER),
            "qzeros": pack_columns(zeros, AWQ_ORDER),
            "scales": scales,
        }
    if layout == "compressed-tensors":
        tensors = {
            "weight_packed": pack_columns(codes.t()),
            "weight_scale": scales.t().contiguous(),
            "weight_shape": torch.tensor(codes.t().shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = pack_columns(zeros).t().contiguous()
        return tensors | ({"weight_g_idx": g_idx} if act_order else {})
    stored = zeros if layout == "gptq-v2" else (zeros - 1) & 15
    return {
        "qweight": pack_columns(codes.t()).t().contiguous(),
        "qzeros": pack_columns(stored),
        "scales": scales,
        "g_idx": g_idx,
    }


def quantisation_config(layout: str, group_size: int, symmetric: bool, act_order: bool) -> dict | None:
    """What config.json says of the weights."""
    if layout == "awq":
        common = {"bits": 4, "group_size": group_size, "modules_to_not_convert": None}
        return {"quant_method": "awq", "version": "gemm", "zero_point": True, **common}
    if layout == "compressed-tensors":
        weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group_size}
        weights |= {"symmetric": symmetric, "dynamic": False, "actorder": "group" if act_order else None}
        groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
        common = {"format": "pack-quantized", "quantization_status": "compressed", "ignore": ["lm_head"]}
        return {"quant_method": "compressed-tensors", **common, "config_groups": groups}
    if layout == "dequantised":
        return None
    version = {"gptq": "gptq", "gptq-v2": "gptq_v2"}[layout]
    common = {"bits": 4, "group_size": group_size, "sym": symmetric, "desc_act": act_order}
    return {"quant_method": "gptq", "checkpoint_format": version, **common}


def write_folder(
    source: Path, target: Path, layout: str, group_size: int, symmetric: bool = False, act_order: bool = False
) -> None:
    """Write ``source`` again with its layers' matrices in a layout; one matrix at a time is quantised.

    Raises:
        FileNotFoundError: ``source`` is no model folder with safetensors, or a shard is missing.
        FileExistsError: ``target`` is there.
        ValueError: the layout cannot hold the model, or a file is damaged; the message says why.
    """
    if layout == "awq" and act_order:
        raise ValueError("AWQ has no act-order: take another --format")
    if not (source / "config.json").is_file():
        raise FileNotFoundError(f"{source} is no model folder: it needs config.json and safetensors")
    files, config = weight_files(source), read_object(source / "config.json")
    if config.pop("quantization_config", None):
        raise ValueError(f"{source} is quantised: give a folder with 16-bit or 32-bit weights")
    if target.exists():
        raise FileExistsError(f"{target} is there already: remove it, or name another folder")
    target.mkdir(parents=True)
    try:
        _write(source, target, files, config, layout, group_size, symmetric, act_order)
    except BaseException:
        shutil.rmtree(target)  # half a model
        raise


def _write(
    source: Path,
    target: Path,
    files: Sequence[Path],
    config: dict,
    layout: str,
    group_size: int,
    symmetric: bool,
    act_order: bool,
) -> None:
    places: dict[str, str] = {}
    for path in files:
        written: dict[str, torch.Tensor] = {}
        for name, stored in read_file(path):
            module, _, kind = name.rpartition(".")
            if kind != "weight" or not module.endswith(MODULES):
                written[name] = stored[()]
                continue
            matrix = quantise(stored[()], group_size, symmetric, act_order)
            packed = pack(matrix, layout, symmetric, act_order)
            written.update({f"{module}.{kind}": tensor for kind, tensor in packed.items()})
        save_file(written, target / path.name, metadata={"format": "pt"})
        (target / path.name).chmod(0o644)  # safetensors makes it private, but a folder may be shared
        places.update(dict.fromkeys(written, path.name))
    if len(files) > 1:
        index = {"metadata": {}, "weight_map": places}
        (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    for path in (path for pattern in TEXT_FILES for path in source.glob(pattern)):
        if path.name != "config.json" and not path.name.endswith(INDEX):
            copy = target / path.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copy(path, copy)
    given = quantisation_config(layout, group_size, symmetric, act_order)
    if given is None:
        config |= {"dtype": "float32", "torch_dtype": "float32"}
    else:
        config["quantization_config"] = given
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a model folder again with 4-bit weights.")
    parser.add_argument("model", type=Path, help="Hugging Face folder with 16-bit or 32-bit safetensors")
    parser.add_argument("folder", type=Path, help="folder to write, which must not be there")
    parser.add_argument("--format", choices=FORMATS, default="awq", help="layout to write (default: %(default)s)")
    parser.add_argument(
        "--group-size", type=int, default=128, help="inputs that share a scale; must divide them (default: %(default)s)"
    )
    parser.add_argument("--symmetric", action="store_true", help="zero point 8 everywhere (default: the best)")
    parser.add_argument(
        "--act-order", action="store_true", help="group inputs by the size of their weights (default: in order)"
    )
    arguments = parser.parse_args()
    try:
        write_folder(
            arguments.model,
            arguments.folder,
            arguments.format,
            arguments.group_size,
            arguments.symmetric,
            arguments.act_order,
        )
    except (OSError, ValueError) as error:
        raise SystemExit(f"quantise: {error}") from None
    print(arguments.folder)


if __name__ == "__main__":
    main()
