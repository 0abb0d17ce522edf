# SPDX-License-Identifier: Apache-2.0
"""Which samples each copy of the model scores."""

import heapq
from collections.abc import Sequence

__all__ = ["balanced_order", "share_of"]


def balanced_order(work: Sequence[float], num_shares: int) -> list[int]:
    """Order items so that contiguous shares of them hold about the same work.

    The largest item goes to the share with the least work so far that still has a place; ties go
    to the lower share. The shares have the sizes that
    :func:`datasets.distributed.split_dataset_by_node` cuts: the first ones hold one more.

    Args:
        work: of each item.
        num_shares: at least 1.

    Returns:
        Places in ``work``, one share after another; within a share the largest first.
    """
    smaller, larger = divmod(len(work), num_shares)
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    loads = [(0.0, share) for share in range(num_shares)]
    for item in sorted(range(len(work)), key=lambda item: (-work[item], item)):
        while True:
            load, share = heapq.heappop(loads)
            if len(shares[share]) < smaller + (share < larger):
                break
        shares[share].append(item)
        heapq.heappush(loads, (load + work[item], share))
    return [item for share in shares for item in share]


def share_of(order: Sequence[int], share: int, num_shares: int) -> list[int]:
    """Return one contiguous share of an order.

    It is the slice that :func:`datasets.distributed.split_dataset_by_node` gives the node of that
    rank, except that there may be fewer items than shares (which ``datasets`` 5.2 answers with an
    IndexError), as in a run that is resumed near its end.
    """
    smaller, larger = divmod(len(order), num_shares)
    first = share * smaller + min(share, larger)
    return list(order[first : first + smaller + (share < larger)])
