"""The graph that autograd has recorded behind a tensor."""

from __future__ import annotations

from torch import Tensor
from torch.autograd.graph import Node

__all__ = ["backward_nodes"]


def backward_nodes(tensor: Tensor) -> set[Node]:
    """All nodes to which the backward of `tensor` comes."""
    found: set[Node] = set()
    left = [tensor.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left += [following for following, _ in node.next_functions]
    return found
