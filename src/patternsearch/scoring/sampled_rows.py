# SPDX-License-Identifier: Apache-2.0
"""Masses of the rows of a sample: of key tiles, and outside each pair of Vertical-Slash budgets."""

from collections.abc import Sequence

import torch
from torch import Tensor

from patternsearch.kernels.score.sampled import unit_column_sums
from patternsearch.patterns.geometry import num_tiles
from patternsearch.patterns.row_sampling import RowSample
from patternsearch.scoring.vertical_slash import VerticalSlashIndex

__all__ = ["sampled_in_torch", "sampled_on_cuda"]


def sampled_on_cuda(
    slashes: Sequence[VerticalSlashIndex],
    q: Tensor,
    k: Tensor,
    *,
    scale: float,
    lse: Tensor | None,
    sample: RowSample,
) -> tuple[Tensor, list[Tensor]]:
    """Measure the rows of a sample with the kernel.

    Args:
        slashes: the Vertical-Slash indices whose pairs of budgets are asked for.
        q: [1, Hq, n, d], any strides.
        k: [1, Hkv, n, d], not repeated.
        scale: factor of the logits.
        lse: float32 [Hq, n], natural log-sum-exp of each row.
        sample: which rows.

    Returns:
        float32 [Hq, units, num_tiles(n, 64)], what a unit's rows give to each key tile; for each
        of ``slashes`` float32 [Hq, units, M, V], what each pair of budgets misses of them.
    """
    from patternsearch.kernels.score.sampled_layout import ColumnBudgets
    from patternsearch.kernels.score.triton_sampled import launch_sampled_masses

    assert lse is not None, "the triton backend needs the rows' log-sum-exp"
    budgets = [
        ColumnBudgets(index.table, index.column_bucket, len(index.vertical.distinct))
        for index in slashes
    ]
    return launch_sampled_masses(q, k, scale=scale, lse=lse, units=sample.units, budgets=budgets)


def sampled_in_torch(
    slashes: Sequence[VerticalSlashIndex],
    q: Tensor,
    k: Tensor,
    *,
    scale: float,
    lse: Tensor | None,
    sample: RowSample,
) -> tuple[Tensor, list[Tensor]]:
    """Do what :func:`sampled_on_cuda` does, anywhere; without ``lse`` each row is normalised."""
    num_heads, device, units = q.shape[1], q.device, sample.units
    first_row = torch.from_numpy(sample.first_row).to(device)
    unit_mass = torch.zeros(num_heads, len(units), num_tiles(q.shape[2], 64), device=device)
    missed = [
        torch.empty(
            num_heads,
            len(units),
            index.table.num_buckets,
            len(index.vertical.distinct),
            device=device,
        )
        for index in slashes
    ]
    for piece in unit_column_sums(q, k, scale=scale, lse=lse, units=units):
        at, sums = piece.units, piece.sums
        left_out = [index.left_out(piece.heads, sums.shape[1]) for index in slashes]
        # The sums are large: tile masses and columns of all indices come from one product.
        ones = sums.new_ones(*sums.shape[:2], 64, 1)
        by_columns = torch.matmul(sums, torch.cat([ones, *left_out], dim=-1))
        widths = [1, *(part.shape[-1] for part in left_out)]
        tile_mass, *mine = torch.split(by_columns, widths, dim=-1)
        for index, out, left, own in zip(slashes, missed, left_out, mine, strict=True):
            out[piece.heads, at] = index.missed_by_unit(sums, left, own, piece.heads, first_row[at])
        unit_mass[piece.heads, at, : sums.shape[1]] = tile_mass[..., 0].transpose(1, 2)
    return unit_mass, missed
