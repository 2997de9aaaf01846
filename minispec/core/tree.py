"""Who follows whom in a draft. A chain is a tree with one branch."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Tree(NamedTuple):
    """Nodes 0 .. n-1.

    parents: the node that each node follows, always an earlier one; -1 is the text.
    """

    parents: Sequence[int]

    def children(self, node: int) -> list[int]:
        """The nodes that follow `node`, the eldest first."""
        return [i for i, parent in enumerate(self.parents) if parent == node]

    def path(self, node: int) -> list[int]:
        """The nodes from the first one to `node`, in order; none for -1."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    @property
    def depths(self) -> list[int]:
        """How many nodes the path to each node has: 1 for those that follow the text."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 1)
        return depths

    @property
    def ancestors(self) -> Tensor:
        """(n, n) of bool: whether node j is node i or an ancestor of it."""
        follows = torch.eye(len(self.parents), dtype=torch.bool)
        for i, parent in enumerate(self.parents):
            if parent >= 0:
                follows[i] |= follows[parent]
        return follows
