# SPDX-License-Identifier: Apache-2.0
"""The tensor-parallel layout as the config records it; head numbering stays global."""

from typing import TYPE_CHECKING

from patternsearch.errors import InputError
from patternsearch.patterns.tensor_parallel import kv_head_range, query_head_range
from patternsearch.schema.config import RankSlice

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["gather_heads", "rank_slices"]


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


def gather_heads(local: "Tensor", size: int) -> "Tensor":
    """Put the heads of all ranks of this copy of the model together.

    Args:
        local: [Hq / size, ...], this rank's heads; of the same shape on every rank.
        size: ranks of the default torch.distributed group; 1 needs no group.

    Returns:
        [Hq, ...], by global head number, on every rank.
    """
    if size == 1:
        return local
    import torch
    import torch.distributed as dist

    assert dist.get_world_size() == size
    parts = [torch.empty_like(local) for _ in range(size)]
    dist.all_gather(parts, local.contiguous())
    return torch.cat(parts)
