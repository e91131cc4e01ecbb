"""Finds batches of graphs whose edges do not belong to their nodes: `collate` adds no offset, or a wrong one."""

import torch
from torch import Tensor
from trainworthy.guard.hooks.trees import tensors

CALLS = 4  # calls of a model that must agree
GRAPHS = 4  # of a batch, at least
MOST = 40  # calls that are read
CROSSING = (0.05, 0.98)
"""Share of edges between graphs: none in a batch of graphs, all where edges are meant to join them."""
BARE = 0.25  # share of a batch's graphs with edges


class Graphs:
    """Calls that get nodes, edges, and a vector with the graph of each node."""

    def __init__(self) -> None:
        self.read = 0
        self.crossing: list[float] = []
        self.bare: list[tuple[int, int]] = []

    def call(self, args: tuple, kwargs: dict) -> None:
        """Note the edges of a model's call."""
        leaves = tensors((args, kwargs))
        whole = [x for x in leaves if x.dtype == torch.int64]
        edges = [x for x in whole if x.dim() == 2 and x.shape[0] == 2 and x.shape[1] > 2]
        if self.read >= MOST or len(edges) != 1:
            return
        nodes = {len(x) for x in leaves if x.dim() == 2 and x is not edges[0]}
        owners = [x for x in whole if x.dim() == 1 and len(x) in nodes and numbered(x)]
        if len(owners) != 1 or not 0 <= int(edges[0].min()) <= int(edges[0].max()) < len(owners[0]):
            return
        self.read += 1
        ends = owners[0][edges[0]]
        count, joined = int(owners[0][-1]) + 1, len(ends.unique())
        self.crossing.append(float((ends[0] != ends[1]).float().mean()))
        self.bare.append((joined, count))

    def fault(self) -> tuple[str, str] | None:
        """Return what is wrong with the edges in all calls."""
        if self.read < CALLS:
            return None
        if all(joined <= BARE * count for joined, count in self.bare):
            joined, count = self.bare[0]
            return (
                f"all edges of a batch of {count} graphs belong to {joined} of them, in each of {self.read} calls",
                "collate adds no offset: the node numbers of each graph must be raised by the nodes of those before it",
            )
        low, high = CROSSING
        if all(low < share < high for share in self.crossing):
            return (
                f"{sum(self.crossing) / self.read:.0%} of the edges of a batch of graphs join nodes of two graphs, in each of {self.read} calls",
                "collate adds a wrong offset: the node numbers of each graph must be raised by the nodes of those before it",
            )
        return None


def numbered(owner: Tensor) -> bool:
    """Return whether a vector numbers the graphs of a batch: from 0 on, in order, each with its nodes."""
    if len(owner) < 2 * GRAPHS or int(owner[0]) or int(owner[-1]) < GRAPHS - 1:
        return False
    steps = owner.diff()
    return bool(((steps == 0) | (steps == 1)).all())
