# SPDX-License-Identifier: Apache-2.0
"""Which global heads a tensor-parallel rank holds.

For size T and rank r: query heads [r·Hq/T, (r+1)·Hq/T). With T ≤ Hkv the kv heads are split the
same way; with T > Hkv each kv head is replicated on T/Hkv ranks. Either way a rank holds exactly
the kv heads that its query heads read.
"""

__all__ = ["kv_head_range", "query_head_range"]


def query_head_range(num_query_heads: int, size: int, rank: int) -> tuple[int, int]:
    """Return [first, past the last) of a rank's global query heads.

    Raises:
        ValueError: If the heads do not divide, or the rank is not in 0..size − 1.
    """
    _check_rank(size, rank)
    if num_query_heads % size:
        raise ValueError(f"{num_query_heads} query heads are not divisible by {size} ranks")
    heads = num_query_heads // size
    return rank * heads, (rank + 1) * heads


def kv_head_range(num_query_heads: int, num_kv_heads: int, size: int, rank: int) -> tuple[int, int]:
    """Return [first, past the last) of a rank's global kv heads.

    Raises:
        ValueError: If the heads do not divide: one of ``size`` and ``num_kv_heads`` must divide
            the other, and ``num_kv_heads`` must divide ``num_query_heads``.
    """
    if num_query_heads % num_kv_heads:
        raise ValueError(
            f"{num_query_heads} query heads are not divisible by {num_kv_heads} kv heads"
        )
    if num_kv_heads % size and size % num_kv_heads:
        raise ValueError(
            f"{num_kv_heads} kv heads can be neither split over nor replicated on {size} ranks"
        )
    first, last = query_head_range(num_query_heads, size, rank)
    group = num_query_heads // num_kv_heads
    return first // group, (last - 1) // group + 1


def _check_rank(size: int, rank: int) -> None:
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is not in 0..{size - 1}")
