# SPDX-License-Identifier: Apache-2.0
"""The online index: scores of columns, diagonals, offsets and key tiles, and their ranks.

These are the plain PyTorch functions; the Triton launchers of the same names are in
``patternsearch.kernels.index.triton``, so that the CPU path needs no Triton.
"""

from patternsearch.kernels.index.reference import (
    block_scores,
    last_q_scores,
    rank,
    rank_blocks,
    spread_scores,
    spread_scores_by_tile,
)

__all__ = [
    "block_scores",
    "last_q_scores",
    "rank",
    "rank_blocks",
    "spread_scores",
    "spread_scores_by_tile",
]
