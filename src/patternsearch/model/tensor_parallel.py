# SPDX-License-Identifier: Apache-2.0
"""The tensor-parallel layout as the config records it; head numbering stays global."""

from patternsearch.errors import InputError
from patternsearch.patterns.tensor_parallel import kv_head_range, query_head_range
from patternsearch.schema.config import RankSlice

__all__ = ["rank_slices"]


def rank_slices(num_query_heads: int, num_kv_heads: int, size: int) -> tuple[RankSlice, ...]:
    """Return what each of ``size`` ranks holds, without predicted times.

    Raises:
        InputError: If the heads cannot be laid out over that many ranks.
    """
    if size < 1:
        raise InputError(f"a tensor-parallel size of {size} is no size; it is at least 1")
    try:
        return tuple(
            RankSlice(
                rank=rank,
                query_heads=query_head_range(num_query_heads, size, rank),
                kv_heads=kv_head_range(num_query_heads, num_kv_heads, size, rank),
                predicted_ms=None,
            )
            for rank in range(size)
        )
    except ValueError as error:
        raise InputError(f"tensor-parallel size {size}: {error}; choose another size") from None
