# SPDX-License-Identifier: Apache-2.0
"""The score statistics that need elements, not whole tiles: slash buckets, offsets, A-shapes.

Each works on tiles of keys × queries with the same probabilities as the main pass, and takes whole
tiles wherever no bound of the pattern cuts one.
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from patternsearch.kernels._common.upload import upload
from patternsearch.kernels.score.triton_kernels import probabilities_fwd
from patternsearch.kernels.score.triton_launch import ScoreOperands
from patternsearch.patterns.geometry import num_tiles

__all__ = ["a_shape_logical", "add_slash_masses", "offset_sums"]

_SCRATCH_BYTES_PER_HEAD = 2**24


@triton.jit(do_not_specialize=["n", "num_segments", "num_buckets"])
def slash_masses_fwd_kernel(
    q, k, neg_lse2, bucket, uniform, mass, segments, first_segment,
    stride_q_h, stride_q_n, stride_q_d, stride_k_h, stride_k_n, stride_k_d, stride_lse_h,
    n, group, scale_log2, num_segments, num_buckets,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the masses of one tile of 64 keys by the bucket of δ = i − j.

    Grid: (tiles, Hq). ``uniform`` is int32 [Hq, tiles]: the bucket that all offsets of a tile
    diagonal are in, or −1. ``segments`` is int32 [segments, 3]: first row, row past the last,
    region. The program owns its columns, so its sums have one order.
    """
    i_v = tl.program_id(0)
    i_h = tl.program_id(1).to(tl.int64)
    n_tiles = (n + 63) // 64
    o_key = i_v * 64 + tl.arange(0, 64)
    m_key = o_key < n
    o_d = tl.arange(0, BLOCK_D)
    m_k = m_key[:, None] & (o_d < HEAD_DIM)[None, :]
    p_k = k + (i_h // group) * stride_k_h + o_key.to(tl.int64)[:, None] * stride_k_n
    b_k = tl.load(p_k + o_d[None, :] * stride_k_d, mask=m_k, other=0.0)  # [64, BLOCK_D]
    p_q = q + i_h * stride_q_h
    p_lse = neg_lse2 + i_h * stride_lse_h
    n_long = n.to(tl.int64)
    for i_s in range(tl.load(first_segment + i_v), num_segments):
        row_first = tl.load(segments + i_s * 3)
        row_end = tl.load(segments + i_s * 3 + 1)
        i_r = tl.load(segments + i_s * 3 + 2)
        i_u = row_first // 64
        o_q = i_u * 64 + tl.arange(0, 64)
        m_p = (o_key[:, None] <= o_q[None, :]) & ((o_q >= row_first) & (o_q < row_end))[None, :]
        b_p = probabilities_fwd(
            b_k, p_q, p_lse, i_u, o_key, stride_q_n, stride_q_d, n, scale_log2,
            HEAD_DIM, BLOCK_D, True, PRECISION,
        )  # fmt: skip
        b_p = tl.where(m_p, b_p, 0.0)
        p_mass = mass + (i_h * num_buckets * 4 + i_r) * n_long + o_key
        i_bucket = tl.load(uniform + i_h * n_tiles + i_u - i_v)
        if i_bucket > 0:
            p_add = p_mass + (i_bucket - 1).to(tl.int64) * 4 * n_long
            tl.atomic_add(p_add, tl.sum(b_p, axis=1), mask=m_key, sem="relaxed")
        elif i_bucket < 0:
            o_offset = o_q[None, :] - o_key[:, None]
            b_bucket = tl.load(bucket + i_h * n_long + o_offset, mask=m_p, other=0).to(tl.int32)
            for i_b in range(1, num_buckets + 1):
                b_column = tl.sum(tl.where(b_bucket == i_b, b_p, 0.0), axis=1)
                p_add = p_mass + 4 * n_long * (i_b - 1)
                tl.atomic_add(p_add, b_column, mask=m_key & (b_column != 0.0), sem="relaxed")


@triton.jit(do_not_specialize=["n", "first_diagonal"])
def offset_sums_fwd_kernel(
    q, k, neg_lse2, scratch,
    stride_q_h, stride_q_n, stride_q_d, stride_k_h, stride_k_n, stride_k_d, stride_lse_h,
    stride_scratch_h, n, group, scale_log2, first_diagonal,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk one tile diagonal (tiles of 64), add its tiles in registers, store their skewed sum.

    Grid: (diagonals, Hq). ``scratch`` is fp32 [Hq, diagonals, 64·127], zero before: the element of
    query row a and key b goes to a·128 + 63 − b, which is row a, column a − b + 63 of [64, 127].
    """
    i_d = first_diagonal + tl.program_id(0)
    i_h = tl.program_id(1).to(tl.int64)
    o_row = tl.arange(0, 64)
    o_d = tl.arange(0, BLOCK_D)
    m_d = (o_d < HEAD_DIM)[None, :]
    p_q = q + i_h * stride_q_h
    p_lse = neg_lse2 + i_h * stride_lse_h
    p_k = k + (i_h // group) * stride_k_h
    b_sum = tl.zeros([64, 64], tl.float32)  # [keys, queries]
    for i_v in range((n + 63) // 64 - i_d):
        i_u = i_d + i_v
        o_key = (i_u - i_d) * 64 + o_row
        m_k = (o_key < n)[:, None] & m_d
        p_key = p_k + o_key.to(tl.int64)[:, None] * stride_k_n
        b_k = tl.load(p_key + o_d[None, :] * stride_k_d, mask=m_k, other=0.0)  # [64, BLOCK_D]
        b_sum += probabilities_fwd(
            b_k, p_q, p_lse, i_u, o_key, stride_q_n, stride_q_d, n, scale_log2,
            HEAD_DIM, BLOCK_D, True, PRECISION,
        )  # fmt: skip
    p_scratch = scratch + i_h * stride_scratch_h + tl.program_id(0).to(tl.int64) * (64 * 127)
    tl.store(p_scratch + o_row[None, :] * 128 + 63 - o_row[:, None], b_sum)


@triton.jit(do_not_specialize=["n", "num_candidates"])
def a_shape_logical_fwd_kernel(
    q, k, neg_lse2, segment_mass, first_segment, sinks, windows, out,
    stride_q_h, stride_q_n, stride_q_d, stride_k_h, stride_k_n, stride_k_d, stride_lse_h,
    stride_segment_h, n, group, scale_log2, num_candidates,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum the logical mass of each (sink, window) over one query tile of 64.

    Grid: (tiles, Hq). Tiles wholly inside come from ``segment_mass``; at most three tiles are cut,
    by the sink's end and by the window's, and are computed again under an element mask.
    ``out`` is fp32 [Hq, candidates, tiles].
    """
    i_u = tl.program_id(0)
    i_h = tl.program_id(1).to(tl.int64)
    n_tiles = (n + 63) // 64
    o_q = i_u * 64 + tl.arange(0, 64)
    o_d = tl.arange(0, BLOCK_D)
    m_d = (o_d < HEAD_DIM)[None, :]
    p_q = q + i_h * stride_q_h
    p_lse = neg_lse2 + i_h * stride_lse_h
    p_k = k + (i_h // group) * stride_k_h
    i_s_first = tl.load(first_segment + i_u)
    i_s_end = tl.load(first_segment + i_u + 1)
    for i_c in range(num_candidates):
        sink = tl.load(sinks + i_c)
        window = tl.load(windows + i_c)
        b_total = tl.zeros([128], tl.float32)
        for i_s in range(i_s_first, i_s_end):
            p_row = segment_mass + i_h * stride_segment_h + n_tiles.to(tl.int64) * i_s
            for i_v in range(0, i_u + 1, 128):
                o_v = i_v + tl.arange(0, 128)
                m_v = ((o_v + 1) * 64 <= sink) | ((i_u - o_v) * 64 + 63 < window)
                b_total += tl.load(p_row + o_v, mask=m_v & (o_v <= i_u), other=0.0)
        total = tl.sum(b_total)
        i_v_sink = sink // 64
        is_sink_cut = sink % 64 != 0
        # Diagonals D that the window's end cuts: 64·D − 63 < window ≤ 64·D + 63.
        i_d_first = tl.maximum(window, 0) // 64
        for i_cut in range(3):
            i_v_cut = i_u - i_d_first - i_cut + 1
            is_cut = (i_cut > 0) & ((i_u - i_v_cut) * 64 - 63 < window)
            is_cut = is_cut & (((i_v_cut + 1) * 64) > sink)
            is_cut = is_cut & ((i_v_cut != i_v_sink) | (is_sink_cut == 0))
            if i_cut == 0:
                i_v_cut = i_v_sink
                is_cut = is_sink_cut
            is_cut = is_cut & ((i_u - i_v_cut) * 64 + 63 >= window)
            if is_cut & (i_v_cut >= 0) & (i_v_cut <= i_u):
                o_key = i_v_cut * 64 + tl.arange(0, 64)
                m_k = (o_key < n)[:, None] & m_d
                p_key = p_k + o_key.to(tl.int64)[:, None] * stride_k_n
                b_k = tl.load(p_key + o_d[None, :] * stride_k_d, mask=m_k, other=0.0)
                b_p = probabilities_fwd(
                    b_k, p_q, p_lse, i_u, o_key, stride_q_n, stride_q_d, n, scale_log2,
                    HEAD_DIM, BLOCK_D, True, PRECISION,
                )  # fmt: skip
                m_set = (o_key < sink)[:, None] | ((o_q[None, :] - o_key[:, None]) < window)
                total += tl.sum(tl.sum(tl.where(m_set, b_p, 0.0), axis=1), axis=0)
        tl.store(out + (i_h * num_candidates + i_c) * n_tiles + i_u, total)


def add_slash_masses(op: ScoreOperands, bucket: Tensor, num_buckets: int, mass: Tensor) -> None:
    """Add to ``mass`` [Hq, B, 4, n] the masses by the bucket of i − j; ``bucket`` is [Hq, n]."""
    tiles = num_tiles(op.n, 64)
    # A tile of diagonal D holds offsets of the 64-chunks D − 1 and D; one value in both will do.
    last = bucket[:, -1:].expand(-1, tiles * 64 - op.n)
    chunks = torch.cat([bucket, last], dim=1).view(op.num_heads, tiles, 64).int()
    low, high = chunks.amin(2), chunks.amax(2)
    before = torch.arange(tiles, device=bucket.device).sub(1).clamp(min=0)
    is_uniform = torch.minimum(low, low[:, before]) == torch.maximum(high, high[:, before])
    uniform = torch.where(is_uniform, low, -1).to(torch.int32).contiguous()
    slash_masses_fwd_kernel[(tiles, op.num_heads)](
        op.q, op.k, op.neg_lse2, bucket, uniform, mass, op.segments, op.first_segment,
        *op.strides, op.n, op.group, op.scale_log2, op.num_segments, num_buckets,
        **op.constants, num_warps=4, num_stages=2,
    )  # fmt: skip


def offset_sums(op: ScoreOperands) -> Tensor:
    """Return Σ_i p_{i, i−δ} at δ as float32 [Hq, n]."""
    tiles = num_tiles(op.n, 64)
    chunk = max(1, min(tiles, _SCRATCH_BYTES_PER_HEAD // (64 * 127 * 4)))
    sums = op.q.new_zeros(op.num_heads, (tiles + 1) * 64, dtype=torch.float32)
    scratch = op.q.new_empty(op.num_heads, chunk, 64 * 127, dtype=torch.float32)
    for first in range(0, tiles, chunk):
        count = min(chunk, tiles - first)
        scratch.zero_()
        offset_sums_fwd_kernel[(count, op.num_heads)](
            op.q, op.k, op.neg_lse2, scratch, *op.strides, scratch.stride(0),
            op.n, op.group, op.scale_log2, first, **op.constants, num_warps=4, num_stages=2,
        )  # fmt: skip
        # [Hq, count, 127]: offset 64·D + x − 63 of diagonal D at x.
        parts = scratch[:, :count].unflatten(2, (64, 127)).sum(2)
        below = sums[:, (first + 1) * 64 :].unflatten(1, (-1, 64))[:, :count]
        above = sums[:, first * 64 :].unflatten(1, (-1, 64))[:, :count]
        below += parts[:, :, 63:]  # δ = 64·D … 64·D + 63, one tile further to leave room for δ < 0
        above[:, :, 1:] += parts[:, :, :63]
    return sums[:, 64 : 64 + op.n].contiguous()


def a_shape_logical(
    op: ScoreOperands, segment_mass: Tensor, sinks: Sequence[int], windows: Sequence[int]
) -> Tensor:
    """Return the logical mass of each sink × window, summed over rows, as [Hq, sinks, windows]."""
    tiles = num_tiles(op.n, 64)
    pairs = [(sink, window) for sink in sinks for window in windows]
    sink_limits, window_limits = upload(
        np.minimum(np.asarray(pairs), op.n).astype(np.int32).T, op.q.device
    )
    out = op.q.new_empty(op.num_heads, len(pairs), tiles, dtype=torch.float32)
    a_shape_logical_fwd_kernel[(tiles, op.num_heads)](
        op.q, op.k, op.neg_lse2, segment_mass, op.first_segment,
        sink_limits, window_limits, out,
        *op.strides, segment_mass.stride(0), op.n, op.group, op.scale_log2, len(pairs),
        **op.constants, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out.sum(2).view(op.num_heads, len(sinks), len(windows))
