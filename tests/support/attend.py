"""Random layers, hand-chosen sets and their masks, for the tests of sparse attention."""

from dataclasses import dataclass

import torch

from patternsearch.kernels.attend import DiagonalSets, ImplicitSets, ListedSets, make_plan
from patternsearch.kernels.attend.reference import (
    a_shape_mask,
    block_sparse_mask,
    causal_mask,
    vertical_slash_mask,
)
from patternsearch.patterns.geometry import (
    a_shape_sink_tiles,
    a_shape_window_diagonals,
    num_tiles,
)


@dataclass(frozen=True)
class Head:
    """One head's sets, by hand."""

    kind: str
    tile: int
    sink: int = 0
    window: int = 1
    columns: tuple = ()
    diagonals: tuple = (0,)
    blocks: int = 1
    seed: int = 0

    def tiles(self, n):
        """Return the key tiles of each query tile of a block_sparse head, descending."""
        generator = torch.Generator().manual_seed(self.seed)
        lists = []
        for u in range(num_tiles(n, self.tile)):
            others = torch.randperm(u, generator=generator)[: self.blocks - 1].tolist()
            lists.append(sorted({u, *others}, reverse=True))
        return lists

    def mask(self, n):
        """Return the pairs of the physical set, bool [n, n]."""
        if self.kind == "dense":
            return causal_mask(n)
        if self.kind == "a_shape":
            return a_shape_mask(n, tile=self.tile, sink=self.sink, window=self.window)
        if self.kind == "vertical_slash":
            columns = [c for c in self.columns if c < n]
            return vertical_slash_mask(n, tile=self.tile, columns=columns, diagonals=self.diagonals)
        return block_sparse_mask(n, tile=self.tile, tiles=self.tiles(n))

    def sets(self, head, n, device):
        """Return the sets that a plan is made of."""
        count = num_tiles(n, self.tile)
        if self.kind == "dense":
            return ImplicitSets((head,), self.tile, (0,), (count,))
        if self.kind == "a_shape":
            sinks = a_shape_sink_tiles(n, self.tile, self.sink)
            windows = a_shape_window_diagonals(n, self.tile, self.window)
            return ImplicitSets((head,), self.tile, (sinks,), (windows,))
        if self.kind == "vertical_slash":
            chosen = torch.zeros(1, count, dtype=torch.uint8)
            chosen[0, [d for d in self.diagonals if d < count]] = 1
            columns = torch.tensor(
                sorted(c for c in self.columns if c < n), dtype=torch.int32, device=device
            )
            return DiagonalSets((head,), self.tile, chosen.to(device), columns, (columns.numel(),))
        tiles = torch.zeros(count, self.blocks, dtype=torch.int32)
        for u, row in enumerate(self.tiles(n)):
            tiles[u, : len(row)] = torch.tensor(row, dtype=torch.int32)
        return ListedSets((head,), self.tile, tiles.reshape(-1).to(device), (self.blocks,))


def plan_of(heads, n, device="cpu"):
    """Return the plan of hand-chosen heads."""
    sets = [head.sets(index, n, device) for index, head in enumerate(heads)]
    return make_plan(n, len(heads), sets, device=device)


def masks_of(heads, n):
    """Return the pairs of hand-chosen heads, bool [Hq, n, n]."""
    return torch.stack([head.mask(n) for head in heads])


def random_layer(num_heads, num_kv_heads, n, head_dim, *, dtype=torch.float32, device="cpu",
                 seed=0, magnitude=1.0):  # fmt: skip
    """Return q, k, v of one layer; q and k as a model hands them over, transposed."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(1, n, heads, head_dim, generator=generator) * magnitude
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    return tuple(x.to(dtype).to(device).transpose(1, 2) for x in (q, k, v))


MIXED = (
    Head("dense", 64),
    Head("a_shape", 64, sink=70, window=65),
    Head("vertical_slash", 64, columns=(0, 1, 63, 64, 130, 200, 201), diagonals=(0, 2)),
    Head("block_sparse", 64, blocks=2),
)
"""One head of each kind, 64 tiles."""


def poison(device):
    """Fill memory that will be reused with NaN, so that an unwritten output shows."""
    torch.full((2**16,), float("nan"), device=device)


def with_distant_rows(x):
    """Return x [1, 1, n, d] again, its last row 2³¹ elements and more behind its first."""
    n, head_dim = x.shape[2:]
    step = 2**31 // (n - 1) // 64 * 64 + 64
    memory = torch.empty((n - 1) * step + head_dim, dtype=x.dtype, device=x.device)
    distant = memory.as_strided(x.shape, (memory.numel(), memory.numel(), step, 1))
    assert (n - 1) * step >= 2**31
    return distant.copy_(x)
