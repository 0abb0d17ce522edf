# SPDX-License-Identifier: Apache-2.0
"""What each tensor-parallel rank will run, and what it will take."""

from patternsearch.errors import InputError
from patternsearch.patterns.tensor_parallel import kv_head_range, query_head_range
from patternsearch.schema.config import HeadEntry, ModelIdentity, RankSlice, TensorParallel

__all__ = ["Heads", "rank_layout", "rank_milliseconds"]

Heads = tuple[tuple[HeadEntry, ...] | None, ...]


def rank_layout(model: ModelIdentity, heads: Heads, size: int) -> TensorParallel:
    """Return the slices of ``size`` ranks with each one's predicted time.

    Raises:
        InputError: the model's heads cannot be laid out on so many ranks.
    """
    try:
        slices = [
            (
                query_head_range(model.num_query_heads, size, rank),
                kv_head_range(model.num_query_heads, model.num_kv_heads, size, rank),
            )
            for rank in range(size)
        ]
    except ValueError as problem:
        raise InputError(f"tensor-parallel size {size} does not fit: {problem}") from None
    return TensorParallel(
        size=size,
        ranks=tuple(
            RankSlice(
                rank=rank,
                query_heads=query_heads,
                kv_heads=kv_heads,
                predicted_ms=rank_milliseconds(heads, query_heads),
            )
            for rank, (query_heads, kv_heads) in enumerate(slices)
        ),
    )


def rank_milliseconds(heads: Heads, query_heads: tuple[int, int]) -> float | None:
    """Sum the predicted time of a slice of heads over layers, at the longest length.

    None as soon as one head has no measured prediction.
    """
    total = 0.0
    for layer in heads:
        for head in (layer or ())[slice(*query_heads)]:
            last = head.lengths[-1].predicted_ms if head.lengths else None
            if last is None:
                return None
            total += last
    return round(total, 6)
