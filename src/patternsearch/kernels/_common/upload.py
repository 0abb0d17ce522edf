# SPDX-License-Identifier: Apache-2.0
"""Small host tables on the device, without waiting for it, and each only once.

The tables of a plan follow from lengths and budgets, so layer after layer asks for the same ones.
What is returned is shared: never write to it.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["column_spans", "head_index", "list_spans", "upload"]


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return host numbers as a tensor on the device; equal numbers give the same tensor."""
    array = np.ascontiguousarray(array)
    return _upload(array.tobytes(), array.dtype.str, array.shape, device)


@lru_cache(maxsize=1024)
def _upload(data: bytes, dtype: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    host = torch.from_numpy(np.frombuffer(bytearray(data), dtype=dtype).reshape(shape))
    if device.type != "cuda":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def head_index(heads: Sequence[int], device: torch.device) -> Tensor:
    """Return head numbers as an int32 tensor."""
    return upload(np.asarray(heads, dtype=np.int32), device)


def column_spans(
    num_columns: tuple[int, ...], num_tiles: int, padding: int, device: torch.device
) -> tuple[Tensor, int]:
    """Lay out columns and the rows of loose columns made from them.

    Returns:
        int64 [4, G]: where a head's columns start, how many there are, where its rows of loose
        columns start, and their stride over query tiles; the total length of all rows.
    """
    sizes = np.asarray(num_columns, dtype=np.int64)
    stride = -(-sizes // padding) * padding
    total = stride * num_tiles
    spans = np.stack([np.cumsum(sizes) - sizes, sizes, np.cumsum(total) - total, stride])
    return upload(spans, device), int(total.sum())


def list_spans(
    budgets: tuple[int, ...], query_tiles: int | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Lay out the lists of groups, one after the other.

    Args:
        budgets: places in each row of a group's list.
        query_tiles: rows of each list; None for one.
        device: where the result is.

    Returns:
        int64 [groups]: budgets; where each list starts.
    """
    sizes = np.asarray(budgets, dtype=np.int64)
    starts = (np.cumsum(sizes) - sizes) * (1 if query_tiles is None else query_tiles)
    limit, begin = upload(np.stack([sizes, starts]), device)
    return limit, begin
