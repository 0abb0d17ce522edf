# SPDX-License-Identifier: Apache-2.0
"""The correctness gate: nothing is timed before it has given the right output in the same run."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from patternsearch.errors import CheckFailed
from patternsearch.kernels.attend.chunked import query_tile_keys
from patternsearch.kernels.attend.plan import AttendPlan
from patternsearch.kernels.attend.reference import attend_reference, causal_mask
from patternsearch.patterns.candidates import (
    AShape,
    BlockSparse,
    Candidate,
    Dense,
    Tile,
    VerticalSlashLastQ,
    VerticalSlashSpread,
    describe,
)
from patternsearch.timing.workload import DenseBackend, LayerKernels, make_inputs

__all__ = ["check_kernels", "plan_mask"]

NUM_TOKENS = 500
"""An odd length: the last tile is partial at both tile sizes."""

_ALLOWANCE = 3.0
"""A kernel may lose this many times what plain arithmetic in the same dtype loses."""


def check_kernels(
    kernels: LayerKernels,
    dense: list[DenseBackend],
    *,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Hold every kernel that will be timed against naive masked attention.

    The sparse kernel must give the output of exactly the pairs of its plan, and the plan must
    hold what the candidate says: every row its diagonal tile, budgets kept.

    Raises:
        CheckFailed: a kernel is wrong; names it.
    """
    q, k, v = make_inputs(NUM_TOKENS, head_dim, 4, 2, dtype, device, seed=1)[0]
    scale = head_dim**-0.5
    everything = causal_mask(NUM_TOKENS).expand(4, -1, -1)
    for backend in dense:
        _compare(backend.name, backend.run(q, k, v, scale), q, k, v, scale, everything)
    for candidate in filter(kernels.runs, _candidates()):
        plan = kernels.plan([candidate] * 4, q, k, scale)
        mask = plan_mask(plan)
        if not (mask <= everything).all() or not mask.diagonal(dim1=1, dim2=2).all():
            raise CheckFailed(
                f"{kernels.name}: the index of {describe(candidate)} reads above the diagonal "
                "or leaves a row without its own key"
            )
        if isinstance(candidate, Dense) and not torch.equal(mask, everything):
            raise CheckFailed(f"{kernels.name}: the dense plan does not read every causal pair")
        out = kernels.attend(q, k, v, scale, plan)
        _compare(f"{kernels.name} {describe(candidate)}", out, q, k, v, scale, mask)


def _candidates() -> Iterator[Candidate]:
    yield Dense()
    tiles: tuple[Tile, ...] = (64, 128)
    for tile in tiles:
        yield AShape(sink=70, window=200, tile=tile)
        yield VerticalSlashSpread(vertical=50, diagonals=3, tile=tile)
        yield VerticalSlashSpread(vertical=50, diagonals=3, tile=tile, last_q=128, spread_rows=128)
        yield VerticalSlashLastQ(vertical=40, slash=120, tile=tile)
        yield BlockSparse(blocks=3, tile=tile)
        yield BlockSparse(blocks=3, tile=tile, estimator="pooled")


def plan_mask(plan: AttendPlan) -> Tensor:
    """Return the pairs that a plan reads, bool [Hq, n, n] on the CPU; each pair once.

    Raises:
        CheckFailed: a query tile reads a key twice.
    """
    mask = torch.zeros(plan.num_heads, plan.n, plan.n, dtype=torch.bool)
    for part in plan.tile_plans:
        host = replace(
            part,
            **{
                name: getattr(part, name).cpu()
                for name in ("meta", "tile_count", "column_count", "lists", "columns", "order")
            },
        )
        for row, head in enumerate(part.heads):
            for u in range(part.tile_count.shape[1]):
                keys = query_tile_keys(host, row, u, plan.n)
                if int(torch.bincount(keys, minlength=plan.n).max()) > 1:
                    raise CheckFailed(f"head {head}, query tile {u}: the plan reads a key twice")
                mask[head, u * part.tile : (u + 1) * part.tile, keys] = True
    return mask & causal_mask(plan.n)


def _compare(
    name: str, out: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor
) -> None:
    exact = attend_reference(q.cpu(), k.cpu(), v.cpu(), scale=scale, mask=mask)[0]
    # What is lost by rounding the exact result once, and the weights before the product.
    rounding = torch.finfo(q.dtype).eps * v.abs().max().item()
    lost = (out.cpu().double() - exact).abs().max().item()
    if not lost <= _ALLOWANCE * rounding + 1e-5:
        raise CheckFailed(
            f"{name} is wrong: its output differs from masked attention by {lost:.3g} where "
            f"rounding explains {rounding:.3g}; no time is measured. Report this GPU and its "
            f"versions (`patternsearch env`)"
        )
