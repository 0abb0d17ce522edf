# SPDX-License-Identifier: Apache-2.0
"""Column sums of some query rows, and a little of every row: what row sampling needs.

Rows come in units within one tile of 64. A unit's sums over its rows, for every key, are a small
part of its probabilities; whatever is asked of whole tiles or of columns follows from them. They
are handed over piece by piece, never all at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

__all__ = ["BLOCK_ROWS", "ColumnSums", "near_masses", "unit_column_sums", "unit_rows"]

BLOCK_ROWS = 64
"""Query rows that are multiplied at a time: several units, or one of a whole tile."""
_SUMS_ELEMENTS = {"cpu": 2**22, "cuda": 2**27}
"""Largest number of sums held at a time by device type; at least those of one block of rows."""
_PRODUCT_ELEMENTS = {"cpu": 2**21, "cuda": 2**27}
"""Largest number of probabilities held at a time; at least those of one kv head."""


@dataclass(frozen=True, slots=True)
class ColumnSums:
    """Sums of some heads and consecutive items of the list of units.

    Attributes:
        heads: query heads.
        units: places in the list of units.
        sums: float32 [heads, key tiles, units, 64], Σ over the unit's rows of p_ij at key
            j = 64·tile + column; key tiles up to the one of the last unit; 0 beyond a row.
    """

    heads: slice
    units: slice
    sums: Tensor


def unit_column_sums(
    q: Tensor,
    k: Tensor,
    *,
    scale: float,
    lse: Tensor | None,
    units: tuple[range, ...],
) -> Iterator[ColumnSums]:
    """Yield the column sums of every head and unit once, in plain PyTorch, computed in float32.

    Args:
        q: [1, Hq, n, d], floating, any strides.
        k: [1, Hkv, n, d], not repeated.
        scale: factor of the logits.
        lse: float32 [Hq, n], natural log-sum-exp of each row; None to normalise each row here.
        units: rows of each, all with one step, each within one tile of 64; tiles ascend.
    """
    num_heads, n, group = q.shape[1], q.shape[2], q.shape[1] // k.shape[1]
    assert q.shape[0] == k.shape[0] == 1, (q.shape, k.shape)
    assert k.shape[2:] == q.shape[2:], (q.shape, k.shape)
    assert num_heads == group * k.shape[1], (q.shape, k.shape)
    products, held = (
        limits.get(q.device.type, limits["cuda"]) for limits in (_PRODUCT_ELEMENTS, _SUMS_ELEMENTS)
    )
    blocks = unit_rows(units).to(q.device)
    per_block = blocks.shape[1]
    step_heads = group * max(1, products // (group * BLOCK_ROWS * n))
    step_units = per_block * max(1, held // (step_heads * n * per_block))
    for head in range(0, num_heads, step_heads):
        heads = slice(head, min(head + step_heads, num_heads))
        keys = k[0, heads.start // group : heads.stop // group].float()
        for first in range(0, len(units), step_units):
            places = slice(first, min(first + step_units, len(units)))
            width = (units[places.stop - 1].start // 64 + 1) * 64
            count = places.stop - places.start
            sums = torch.zeros(heads.stop - heads.start, width // 64, count, 64, device=q.device)
            for at in range(0, count, per_block):
                rows = blocks[(first + at) // per_block, : count - at]
                p = _probabilities(q[0, heads], keys, scale, lse, heads, rows.flatten())
                total = p.view(len(p), *rows.shape, p.shape[2]).sum(2)
                tiles = total.shape[2] // 64
                sums[:, :tiles, at : at + len(rows)] = total.unflatten(2, (tiles, 64)).transpose(
                    1, 2
                )
            yield ColumnSums(heads, places, sums)


@lru_cache(maxsize=32)
def unit_rows(units: tuple[range, ...]) -> Tensor:
    """Lay out the rows of units in blocks of 64 rows; the result is shared, never write to it.

    Returns:
        int32 [blocks, units of a block, rows of a unit] on the CPU, −1 where there is no row. A
        unit has a power of two of places.
    """
    step = max(unit.step for unit in units)
    first, count = np.array([(unit.start, len(unit)) for unit in units]).T
    places = 1 << (int(count.max()) - 1).bit_length()
    per_block = BLOCK_ROWS // places
    rows = np.full((-(-len(units) // per_block) * per_block, places), -1, dtype=np.int32)
    place = np.arange(places)
    rows[: len(units)] = np.where(place < count[:, None], first[:, None] + step * place, -1)
    return torch.from_numpy(rows).view(-1, per_block, places)


def near_masses(
    q: Tensor,
    k: Tensor,
    *,
    scale: float,
    lse: Tensor,
    backend: Literal["torch", "triton"] = "torch",
) -> Tensor:
    """Return float32 [Hq, n, 3]: what each row gives to three key tiles of 64.

    They are tile 0, the row's own tile and the one before; the last two are 0 where they are an
    earlier one of the three again, or do not exist. 192 keys a row, whatever n.

    Args:
        q: [1, Hq, n, d], floating, any strides.
        k: [1, Hkv, n, d], not repeated.
        scale: factor of the logits.
        lse: float32 [Hq, n], natural log-sum-exp of each row.
        backend: ``torch`` runs anywhere; ``triton`` needs CUDA tensors.
    """
    if backend == "triton":
        from patternsearch.kernels.score.triton_near import launch_near_masses

        return launch_near_masses(q, k, scale=scale, lse=lse)
    num_heads, n = q.shape[1:3]
    num_kv = k.shape[1]
    masses = torch.zeros(num_heads, n, 3, device=q.device)
    limit = _PRODUCT_ELEMENTS.get(q.device.type, _PRODUCT_ELEMENTS["cuda"]) // 4
    step = max(1, limit // (num_heads * 64 * 64))
    num_tiles = -(-n // 64)
    row = torch.arange(64, device=q.device)
    for first in range(0, num_tiles, step):
        tiles = torch.arange(first, min(first + step, num_tiles), device=q.device)
        rows = slice(first * 64, min((first + step) * 64, n))
        pad = len(tiles) * 64 - (rows.stop - rows.start)
        queries = torch.nn.functional.pad(q[0, :, rows].float() * scale, (0, 0, 0, pad))
        queries = queries.view(num_kv, -1, len(tiles), 64, q.shape[3]).transpose(1, 2).flatten(2, 3)
        norm = torch.nn.functional.pad(lse[:, rows], (0, pad), value=float("inf"))
        for which, key_tile in enumerate((tiles * 0, tiles, tiles - 1)):
            at = (key_tile.clamp(min=0)[:, None] * 64 + row).clamp(max=n - 1)
            keys = k[0][:, at].float()  # [kv heads, tiles, 64, d]
            logits = torch.matmul(queries, keys.transpose(2, 3))
            logits = logits.unflatten(2, (-1, 64)).transpose(1, 2)  # [kv, group, tiles, 64, 64]
            p = (logits.flatten(0, 1) - norm.view(num_heads, len(tiles), 64, 1)).exp()
            hidden = (key_tile[:, None, None] * 64 + row) > (tiles[:, None] * 64 + row)[..., None]
            if which:
                hidden = hidden | (key_tile <= 0)[:, None, None]
            mass = p.masked_fill(hidden, 0.0).sum(-1).flatten(1)
            masses[:, rows, which] = mass[:, : rows.stop - rows.start]
    return masses


def _probabilities(
    q: Tensor, keys: Tensor, scale: float, lse: Tensor | None, heads: slice, rows: Tensor
) -> Tensor:
    """Return [heads, rows, keys of all tiles up to the last row's]; 0 for a row of −1.

    Args:
        q: [heads, n, d].
        keys: float32 [kv heads, n, d].
        scale: factor of the logits.
        lse: float32 [Hq, n] of all heads, or None to normalise each row here.
        heads: which heads these are.
        rows: [rows], at least one of them a row.
    """
    first, width = int(rows[0]) // 64 * 64, (int(rows.max()) // 64 + 1) * 64
    real = min(width, keys.shape[1])
    at = rows.clamp(min=0)
    queries = (q[:, at].float() * scale).reshape(len(keys), -1, q.shape[2])
    logits = torch.bmm(queries, keys[:, :real].transpose(1, 2)).view(len(q), len(rows), real)
    hidden = torch.arange(first, real, device=q.device) > at[:, None]
    logits[..., first:].masked_fill_(hidden, float("-inf"))
    if lse is None:
        p = torch.softmax(logits, dim=-1)
    else:
        p = logits.sub_(lse[heads][:, at, None]).exp_()
    if int(rows.min()) < 0:
        p.masked_fill_((rows < 0)[:, None], 0.0)
    return torch.nn.functional.pad(p, (0, width - real)) if real < width else p
