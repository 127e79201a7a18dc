"""Nested arguments of torch's operations: tuples, lists, dicts. torch's own walk takes longer than the operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

SEQUENCES = tuple, list
NESTED = tuple, list, dict


def leaves_of(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, SEQUENCES):
        return [tree]
    leaves: list[Any] = []
    for branch in tree:
        if isinstance(branch, NESTED):
            leaves += leaves_of(branch)
        else:
            leaves.append(branch)
    return leaves


def replaced(kind: type, replace: Callable[[Any], Any], tree: Any) -> Any:
    """The same with every leaf of ``kind`` replaced."""
    if isinstance(tree, kind):
        return replace(tree)
    if isinstance(tree, SEQUENCES):
        branches = [replaced(kind, replace, b) if isinstance(b, (kind, *NESTED)) else b for b in tree]
        return type(tree)(branches)
    if isinstance(tree, dict):
        return {name: replaced(kind, replace, branch) for name, branch in tree.items()}
    return tree


def key_of(argument: Any) -> object:
    """What decides the shapes of an operation's result."""
    if isinstance(argument, torch.Tensor):
        return tuple(argument.shape), argument.stride(), argument.dtype
    if isinstance(argument, SEQUENCES):
        return tuple(map(key_of, argument))
    if isinstance(argument, dict):
        return tuple((name, key_of(value)) for name, value in argument.items())
    return type(argument), argument


def shape_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like it without content."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
