# SPDX-License-Identifier: Apache-2.0
"""Launcher of the score pass on CUDA: the results of the chunked PyTorch path, from Triton.

A pass reduces under at most three bucket tables; more tables take more passes over the scores.
Every sum has one order: a result does not change from run to run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from patternsearch.errors import InputError
from patternsearch.kernels._common.checks import check_attention_inputs, device_guard
from patternsearch.kernels.score import triton_elements, triton_kernels
from patternsearch.kernels.score.tables import BucketTable, ScoreMasses
from patternsearch.kernels.score.triton_launch import (
    ScoreLaunch,
    ScoreOperands,
    can_run_hopper,
    launch_first_that_fits,
    score_launches,
)
from patternsearch.patterns.geometry import NUM_REGIONS, num_tiles

__all__ = ["score_masses"]

_TABLES_PER_PASS = 3
_HOPPER_MODULE = "patternsearch.kernels.score.gluon_hopper"
_KIND = {"tile": triton_kernels.KIND_TILE, "offset": triton_kernels.KIND_OFFSET}


def score_masses(
    q: Tensor,
    k: Tensor,
    *,
    scale: float,
    lse: Tensor | None = None,
    tables: Sequence[BucketTable] = (),
    column_sums: bool = False,
    offset_sums: bool = False,
    a_shape_sinks: Sequence[int] = (),
    a_shape_windows: Sequence[int] = (),
    launches: Sequence[ScoreLaunch] | None = None,
) -> ScoreMasses:
    """Reduce the causal attention probabilities of one layer in one pass; see ``README.md``.

    Deterministic; products in q's dtype, sums in float32 (float32 inputs: IEEE products).

    Args:
        q: [1, Hq, n, d], bfloat16, float16 or float32, any strides, d ≤ 256.
        k: [1, Hkv, n, d], not repeated; head h reads kv head h // (Hq / Hkv).
        scale: factor of the logits.
        lse: float32 [Hq, n], natural log-sum-exp of the scaled causal logits of each row; needed
            (:func:`patternsearch.kernels.score.lse.attention_with_lse` gives it).
        tables: bucket tables to reduce under (:class:`BucketTable`), tile 64 or 128.
        column_sums: fill ``column_sum``.
        offset_sums: fill ``offset_sum``; one more pass.
        a_shape_sinks: sinks in tokens; with ``a_shape_windows`` fills ``a_shape_logical``.
        a_shape_windows: windows in tokens.
        launches: launch shapes to try in order; the measured defaults if None.

    Returns:
        The masses, on q's device.

    Raises:
        InputError: a shape, dtype, device or table is not allowed.
        EnvironmentLacks: no CUDA device, or no launch shape fits it.
    """
    check_attention_inputs(q, k)
    op = ScoreOperands(q=q, k=k, lse=_checked_lse(q, lse), scale=scale)
    for table in tables:
        _check_table(table, op)

    segment_mass = _zeros(q, op.num_heads, op.num_segments, num_tiles(op.n, 64))
    column_mass = tuple(
        _zeros(q, op.num_heads, table.num_buckets, NUM_REGIONS, op.n) for table in tables
    )
    by_tile = [
        _Reduction.of_table(table, mass)
        for table, mass in zip(tables, column_mass, strict=True)
        if table.kind != "slash" and table.num_buckets
    ]
    all_pairs = _zeros(q, op.num_heads, 1, NUM_REGIONS, op.n) if column_sums else None
    if all_pairs is not None:
        by_tile.append(_Reduction.of_all_pairs(all_pairs, op))
    shapes = score_launches(q, k) if launches is None else launches
    offset_sum = logical = None
    with device_guard(q):
        for first in range(0, max(1, len(by_tile)), _TABLES_PER_PASS):
            reductions = by_tile[first : first + _TABLES_PER_PASS]
            _run_pass(op, reductions, segment_mass, has_segments=first == 0, launches=shapes)
        for table, mass in zip(tables, column_mass, strict=True):
            if table.kind == "slash" and table.num_buckets:
                bucket = _compact(table.bucket, table.num_buckets)
                triton_elements.add_slash_masses(op, bucket, table.num_buckets, mass)
        if offset_sums:
            offset_sum = triton_elements.offset_sums(op)
        if a_shape_sinks and a_shape_windows:
            logical = triton_elements.a_shape_logical(
                op, segment_mass, a_shape_sinks, a_shape_windows
            )
    column_sum = None if all_pairs is None else all_pairs.sum((1, 2))
    return ScoreMasses(segment_mass, column_mass, column_sum, offset_sum, logical)


@dataclass(frozen=True, slots=True)
class _Reduction:
    """One table of a pass, in the kernel's terms."""

    kind: int
    tile: int
    bucket: Tensor
    num_buckets: int
    mass: Tensor

    @classmethod
    def of_table(cls, table: BucketTable, mass: Tensor) -> "_Reduction":
        bucket = _compact(table.bucket, table.num_buckets)
        return cls(_KIND[table.kind], table.tile, bucket, table.num_buckets, mass)

    @classmethod
    def of_all_pairs(cls, mass: Tensor, op: ScoreOperands) -> "_Reduction":
        return cls(triton_kernels.KIND_ALL, 64, op.neg_lse2, 1, mass)

    @classmethod
    def none(cls, op: ScoreOperands) -> "_Reduction":
        return cls(triton_kernels.KIND_NONE, 64, op.neg_lse2, 1, op.neg_lse2)


def _run_pass(
    op: ScoreOperands,
    reductions: Sequence[_Reduction],
    segment_mass: Tensor,
    *,
    has_segments: bool,
    launches: Sequence[ScoreLaunch],
) -> None:
    """Launch the main kernel, then the one for the tiles on the diagonal and at the edges."""
    slots = [*reductions, *[_Reduction.none(op)] * (_TABLES_PER_PASS - len(reductions))]
    table_args = [arg for r in slots for arg in (r.bucket, r.mass, r.num_buckets)]
    strides = (*op.strides, segment_mass.stride(0), *(r.bucket.stride(0) for r in slots))
    has_tile = any(r.kind == triton_kernels.KIND_TILE for r in reductions)
    table_constants: dict[str, int] = {"HAS_SEGMENTS": has_segments}
    for index, reduction in enumerate(slots):
        table_constants |= {f"KIND_{index}": reduction.kind, f"TILE_{index}": reduction.tile}

    def start(launch: ScoreLaunch) -> None:
        num_blocks = -(-op.n // launch.block_keys)
        sizes = (op.n, op.group, op.scale_log2)
        if launch.kernel == "hopper":
            if not can_run_hopper(op.q, op.k):
                raise InputError(
                    f"launch {launch} cannot run {op.q.dtype}, head_dim {op.q.shape[3]}, strides "
                    f"{op.q.stride()} and {op.k.stride()} on {op.q.device}; use a triton launch."
                )
            hopper = import_module(_HOPPER_MODULE)  # not every Triton has it
            hopper.score_hopper_fwd_kernel[(op.num_heads, num_blocks, NUM_REGIONS)](
                *hopper.hopper_descriptors(op.q, op.k), op.neg_lse2, segment_mass, *table_args,
                *strides[6:], *sizes, HEAD_DIM=op.q.shape[3], **table_constants,
                num_warps=launch.num_warps, maxnreg=launch.max_registers,
            )  # fmt: skip
        else:
            plain = _plain_diagonals(op, reductions, launch.block_keys) if has_tile else op.neg_lse2
            triton_kernels.score_fwd_kernel[(num_blocks, op.num_heads, NUM_REGIONS)](
                op.q, op.k, op.neg_lse2, segment_mass, plain, *table_args, *strides, *sizes,
                **op.constants, BLOCK_K=launch.block_keys, HAS_TILE=has_tile,
                **table_constants, num_warps=launch.num_warps, num_stages=launch.num_stages,
                maxnreg=launch.max_registers,
            )  # fmt: skip

    launch = launch_first_that_fits(launches, start)
    triton_kernels.score_edge_fwd_kernel[(num_tiles(op.n, 64), op.num_heads)](
        op.q, op.k, op.neg_lse2, segment_mass, op.edges, *table_args, *strides,
        op.n, op.group, op.scale_log2, len(op.edges), **op.constants, **table_constants,
        TILES_PER_BLOCK=launch.block_keys // 64, num_warps=4, num_stages=1,
    )  # fmt: skip


def _plain_diagonals(
    op: ScoreOperands, reductions: Sequence[_Reduction], block_keys: int
) -> Tensor:
    """Return where every tile table is in its last bucket for a whole block of keys.

    uint8 [Hq, tiles]: at x = u − v, v the first of the block's key tiles of 64, 1 if each tile
    diagonal x, x − 1, … of the block's key tiles is in the last bucket of each tile table.
    """
    tiles = num_tiles(op.n, 64)
    plain = torch.ones(op.num_heads, tiles, dtype=torch.bool, device=op.q.device)
    for r in reductions:
        if r.kind == triton_kernels.KIND_TILE:
            is_last = (r.bucket == r.num_buckets).repeat_interleave(r.tile // 64, dim=1)
            # A block that starts at a multiple of T has u // T − v // T = x // T − key tile.
            for away in range(0, max(block_keys, r.tile) // 64, r.tile // 64):
                plain[:, away:] &= is_last[:, : tiles - away]
            if block_keys < r.tile:  # and one that starts at T/2 the tile diagonal after it
                plain[:, :-1] &= is_last[:, 1:tiles]
    return plain.to(torch.uint8)


def _zeros(like: Tensor, *shape: int) -> Tensor:
    return like.new_zeros(shape, dtype=torch.float32)


def _compact(bucket: Tensor, num_buckets: int) -> Tensor:
    return bucket.to(torch.uint8 if num_buckets <= 255 else torch.int32).contiguous()


def _checked_lse(q: Tensor, lse: Tensor | None) -> Tensor:
    shape = (q.shape[1], q.shape[2])
    if lse is None:
        raise InputError(
            f"lse is None; the Triton score pass needs the float32 {list(shape)} log-sum-exp of "
            "each row (attention_with_lse returns it)."
        )
    if lse.shape != shape or lse.dtype != torch.float32 or lse.device != q.device:
        raise InputError(
            f"lse is {lse.dtype} {list(lse.shape)} on {lse.device}; it must be float32 "
            f"{list(shape)} on {q.device}."
        )
    return lse


def _check_table(table: BucketTable, op: ScoreOperands) -> None:
    if table.kind != "slash" and table.tile not in (64, 128):
        raise InputError(f"a bucket table has tile {table.tile}; tiles are 64 or 128.")
    entries = {
        "tile": num_tiles(op.n, table.tile),
        "offset": num_tiles(op.n, table.tile) * table.tile,
        "slash": op.n,
    }[table.kind]
    if table.bucket.shape != (op.num_heads, entries) or table.bucket.device != op.q.device:
        raise InputError(
            f"a {table.kind} bucket table is {list(table.bucket.shape)} on {table.bucket.device}; "
            f"it must be {[op.num_heads, entries]} on {op.q.device}."
        )
    if table.num_buckets * NUM_REGIONS * op.n >= 2**31:
        raise InputError(
            f"{table.num_buckets} buckets over {op.n} tokens; buckets × 4 × tokens must stay "
            "below 2³¹. Use fewer budgets."
        )
