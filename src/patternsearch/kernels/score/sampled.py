# SPDX-License-Identifier: Apache-2.0
"""Column sums of some query segments: what row sampling needs of the score pass.

A segment's sums over its at most 64 rows, for every key, are 1/64 of its probabilities; whatever
is asked of whole tiles or of columns follows from them. They are handed over piece by piece, never
all at once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from patternsearch.kernels.score.chunked import column_sums_of_segments

__all__ = ["ColumnSums", "segment_column_sums"]


@dataclass(frozen=True, slots=True)
class ColumnSums:
    """Sums of some heads and consecutive items of the list of segments.

    Attributes:
        heads: query heads.
        segments: places in the list of segments.
        sums: float32 [heads, key tiles, segments, 64], Σ over the segment's rows of p_ij at key
            j = 64·tile + column; key tiles up to the one of the last segment; 0 beyond a row.
    """

    heads: slice
    segments: slice
    sums: Tensor


def segment_column_sums(
    q: Tensor,
    k: Tensor,
    *,
    scale: float,
    lse: Tensor | None,
    segments: Sequence[tuple[int, int]],
    backend: str = "torch",
) -> Iterator[ColumnSums]:
    """Yield the column sums of every head and segment once.

    Args:
        q: [1, Hq, n, d], floating, any strides.
        k: [1, Hkv, n, d], not repeated.
        scale: factor of the logits.
        lse: float32 [Hq, n], natural log-sum-exp of each row; needed by ``triton``.
        segments: first row and row past the last, ascending, each within one tile of 64.
        backend: ``torch`` anywhere; ``triton`` on CUDA.
    """
    if backend == "triton":
        from patternsearch.kernels.score.triton_sampled import launch_column_sums as run
    else:
        run = column_sums_of_segments
    for heads, places, sums in run(q, k, scale=scale, lse=lse, segments=segments):
        yield ColumnSums(heads, places, sums)
