# SPDX-License-Identifier: Apache-2.0
"""The online index of a layer, by PyTorch or by Triton: what scoring ranks by."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Literal

from torch import Tensor

from patternsearch.kernels import index as torch_index
from patternsearch.scoring.tile_sets import rank_tiles

__all__ = ["OnlineIndex"]


class OnlineIndex:
    """Scores columns, diagonals, offsets and tiles of all heads of a layer.

    Args:
        q: [1, Hq, n, d], any strides.
        k: [1, Hkv, n, d], not repeated.
        scale: factor of the logits.
        backend: ``torch`` runs anywhere; ``triton`` needs CUDA tensors.
    """

    def __init__(
        self, q: Tensor, k: Tensor, *, scale: float, backend: Literal["torch", "triton"]
    ) -> None:
        self._q, self._k, self._scale = q, k, scale
        self._on_gpu = backend == "triton"
        self._kernels: Any = torch_index
        if self._on_gpu:
            self._kernels = import_module("patternsearch.kernels.index.triton")

    def ranked_tiles(self, estimator: str, tile: int, budget: int) -> Tensor:
        """Return the best key tiles of each query tile, as ``rank_tiles`` does."""
        arguments = {"scale": self._scale, "tile": tile, "estimator": estimator}
        if not self._on_gpu:
            return rank_tiles(self._kernels.block_scores(self._q, self._k, **arguments), budget)
        from patternsearch.kernels.index.select_triton import select_top

        scores = self._kernels.block_scores(self._q, self._k, **arguments, fill_above=False)
        return rank_tiles(scores, budget, select_top)

    def spread_scores(
        self, keys: Sequence[tuple[int, int, int]]
    ) -> dict[tuple[int, int, int], tuple[Tensor, Tensor]]:
        """Return column and tile-diagonal scores by (last_q, spread_rows, tile).

        Equal rows give one tensor of column scores, whatever the tile.
        """
        scores = {}
        for last_q, spread_rows in dict.fromkeys(key[:2] for key in keys):
            columns, diagonals = self._kernels.spread_scores_by_tile(
                self._q,
                self._k,
                scale=self._scale,
                last_q=last_q,
                spread_rows=spread_rows,
                tiles=[key[2] for key in keys if key[:2] == (last_q, spread_rows)],
            )
            for tile, by_diagonal in diagonals.items():
                scores[last_q, spread_rows, tile] = columns, by_diagonal
        return scores

    def last_q_scores(self, last_q: int) -> tuple[Tensor, Tensor]:
        """Return column and offset scores [Hq, n]."""
        scores: tuple[Tensor, Tensor] = self._kernels.last_q_scores(
            self._q, self._k, scale=self._scale, last_q=last_q
        )
        return scores
