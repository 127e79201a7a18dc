"""Nested arguments of torch's operations: tuples, lists, dicts. torch's own walk takes longer than the operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


def leaves_of(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, tuple | list):
        yield tree
        return
    for branch in tree:
        yield from leaves_of(branch)


def replaced(kind: type, replace: Callable[[Any], Any], tree: Any) -> Any:
    """The same with every leaf of ``kind`` replaced."""
    if isinstance(tree, kind):
        return replace(tree)
    if isinstance(tree, tuple | list):
        return type(tree)([replaced(kind, replace, branch) for branch in tree])
    if isinstance(tree, dict):
        return {name: replaced(kind, replace, branch) for name, branch in tree.items()}
    return tree


def key_of(argument: Any) -> object:
    """What decides the shapes of an operation's result."""
    if isinstance(argument, torch.Tensor):
        return tuple(argument.shape), argument.stride(), argument.dtype
    if isinstance(argument, tuple | list):
        return tuple(map(key_of, argument))
    if isinstance(argument, dict):
        return tuple((name, key_of(value)) for name, value in argument.items())
    return type(argument), argument


def shape_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like it without content."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
