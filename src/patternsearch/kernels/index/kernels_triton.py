# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D103
"""The kernels behind ``triton.py``: sampled rows against all keys, pooled queries against keys."""

import triton
import triton.language as tl

__all__ = [
    "block_scores_fwd_kernel",
    "row_lse_fwd_kernel",
    "row_mass_fwd_kernel",
    "skewed_sum_fwd_kernel",
    "tile_mean_fwd_kernel",
]

LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load_clamped(P, o_row, n, o_dim, stride_n, stride_d, D: tl.constexpr):
    """Load rows; one that does not exist is another, whose pairs the causal mask leaves out.

    A mask of every element costs more than the rows of the last block.
    """
    o_real = tl.minimum(tl.maximum(o_row, 0), n - 1)
    p_rows = P + o_real.to(tl.int64)[:, None] * stride_n + o_dim[None, :] * stride_d
    if o_dim.shape[0] > D:
        b_rows = tl.load(p_rows, mask=(o_dim < D)[None, :], other=0.0)
    else:
        b_rows = tl.load(p_rows)
    return b_rows


@triton.jit
def row_lse_fwd_kernel(
    Q, K, HEADS, POSITIONS,
    n, group, scale_log2,
    stride_qh, stride_qn, stride_qd, stride_kh, stride_kn, stride_kd,
    PARTS,
    D: tl.constexpr, D_PAD: tl.constexpr, NUM_ROWS: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i_part = tl.program_id(0)
    i_g = tl.program_id(1).to(tl.int64)
    i_head = tl.load(HEADS + i_g).to(tl.int64)
    p_q = Q + i_head * stride_qh
    p_k = K + (i_head // group) * stride_kh
    p_out = PARTS + (i_g * tl.num_programs(0) + i_part) * NUM_ROWS
    o_dim = tl.arange(0, D_PAD).to(tl.int64)
    end = tl.minimum((i_part + 1) * KEYS, n)
    for row in range(0, NUM_ROWS, BLOCK_R):
        o_r = row + tl.arange(0, BLOCK_R)
        b_position = tl.load(POSITIONS + o_r)
        b_q = _load_clamped(p_q, b_position, n, o_dim, stride_qn, stride_qd, D)
        b_max = tl.full([BLOCK_R], float("-inf"), tl.float32)
        b_sum = tl.zeros([BLOCK_R], tl.float32)
        for first in range(i_part * KEYS, end, BLOCK_K):
            o_key = first + tl.arange(0, BLOCK_K)
            b_k = _load_clamped(p_k, o_key, n, o_dim, stride_kn, stride_kd, D)
            b_score = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale_log2
            b_score = tl.where(o_key[None, :] <= b_position[:, None], b_score, float("-inf"))
            b_new = tl.maximum(b_max, tl.max(b_score, 1))
            b_base = tl.where(b_new == float("-inf"), 0.0, b_new)  # rows that see no key yet
            b_p = tl.exp2(b_score - b_base[:, None])
            b_sum = b_sum * tl.exp2(b_max - b_base) + tl.sum(b_p, 1)
            b_max = b_new
        b_lse = (b_max + tl.log2(tl.where(b_sum > 0, b_sum, 1.0))) * LN_2
        tl.store(p_out + o_r, b_lse)


@triton.jit
def row_mass_fwd_kernel(
    Q, K, HEADS, POSITIONS,
    n, group, scale_log2,
    stride_qh, stride_qn, stride_qd, stride_kh, stride_kn, stride_kd,
    LSE, WEIGHTS, COLUMN, BY_TILE, num_tiles,
    TILE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, NUM_ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = BLOCK_K // TILE
    i_part = tl.program_id(0)
    i_g = tl.program_id(1).to(tl.int64)
    i_head = tl.load(HEADS + i_g).to(tl.int64)
    p_q = Q + i_head * stride_qh
    p_k = K + (i_head // group) * stride_kh
    o_dim = tl.arange(0, D_PAD).to(tl.int64)
    end = tl.minimum((i_part + 1) * KEYS, n)
    o_r = tl.arange(0, BLOCK_R)
    b_position = tl.load(POSITIONS + o_r)
    b_weight = tl.load(WEIGHTS + o_r)
    b_lse = tl.load(LSE + i_g * NUM_ROWS + o_r) * LOG2_E
    b_q = _load_clamped(p_q, b_position, n, o_dim, stride_qn, stride_qd, D)
    for first in range(i_part * KEYS, end, BLOCK_K):
        o_key = first + tl.arange(0, BLOCK_K)
        b_k = _load_clamped(p_k, o_key, n, o_dim, stride_kn, stride_kd, D)
        b_column = tl.zeros([BLOCK_K], tl.float32)
        for row in tl.static_range(0, NUM_ROWS, BLOCK_R):
            if NUM_ROWS > BLOCK_R:
                o_r = row + tl.arange(0, BLOCK_R)
                b_position = tl.load(POSITIONS + o_r)
                b_weight = tl.load(WEIGHTS + o_r)
                b_lse = tl.load(LSE + i_g * NUM_ROWS + o_r) * LOG2_E
                b_q = _load_clamped(p_q, b_position, n, o_dim, stride_qn, stride_qd, D)
            b_score = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale_log2
            m_pair = o_key[None, :] <= b_position[:, None]
            b_p = tl.where(m_pair, tl.exp2(b_score - b_lse[:, None]), 0.0)
            b_column += tl.sum(b_p * b_weight[:, None], 0)
            if TILES < BLOCK_K:
                b_tile = tl.sum(tl.reshape(b_p, [BLOCK_R, TILES, TILE]), 2)
            else:
                b_tile = b_p
            o_tile = first // TILE + tl.arange(0, TILES)
            p_tile = BY_TILE + (i_g * NUM_ROWS + o_r[:, None]) * num_tiles + o_tile[None, :]
            tl.store(p_tile, b_tile, mask=(o_tile < num_tiles)[None, :])
        tl.store(COLUMN + i_g * n + o_key, b_column, mask=o_key < n)


@triton.jit
def skewed_sum_fwd_kernel(
    VALUES, ORIGINS, WEIGHTS, OUT, length,
    NUM_ROWS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_g = tl.program_id(1).to(tl.int64)
    o_d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_sum = tl.zeros([BLOCK], tl.float32)
    for row in range(0, NUM_ROWS, BLOCK_R):
        o_r = row + tl.arange(0, BLOCK_R)
        o_value = tl.load(ORIGINS + o_r)[:, None] - o_d[None, :]
        p_value = VALUES + (i_g * NUM_ROWS + o_r[:, None]) * length + o_value
        b_value = tl.load(p_value, mask=o_value >= 0, other=0.0)
        b_sum += tl.sum(tl.load(WEIGHTS + o_r)[:, None] * b_value, 0)
    tl.store(OUT + i_g * length + o_d, b_sum, mask=o_d < length)


@triton.jit
def tile_mean_fwd_kernel(
    X, HEADS, OUT, n, num_tiles, stride_h, stride_n, stride_d,
    D: tl.constexpr, D_PAD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    i_u = tl.program_id(0)
    i_g = tl.program_id(1).to(tl.int64)
    i_head = tl.load(HEADS + i_g).to(tl.int64)
    o_dim = tl.arange(0, D_PAD).to(tl.int64)
    o_row = i_u * TILE + tl.arange(0, TILE)
    p_x = X + i_head * stride_h
    p_x += o_row.to(tl.int64)[:, None] * stride_n + o_dim[None, :] * stride_d
    b_x = tl.load(p_x, mask=(o_row < n)[:, None] & (o_dim < D)[None, :], other=0.0)
    b_mean = tl.sum(b_x.to(tl.float32), 0) / tl.minimum(TILE, n - i_u * TILE)
    tl.store(OUT + (i_g * num_tiles + i_u) * D + o_dim, b_mean, mask=o_dim < D)


@triton.jit
def block_scores_fwd_kernel(
    MEANS, K, HEADS, SCORES,
    n, num_tiles, first_u, num_u, first_v, end_v, group, scale_log2,
    stride_kh, stride_kn, stride_kd,
    D: tl.constexpr, D_PAD: tl.constexpr, TILE: tl.constexpr, BLOCK_U: tl.constexpr,
    STEP: tl.constexpr, TILES_PER_PROGRAM: tl.constexpr, IS_WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Score the key tiles first_v … end_v − 1, STEP at a time; IS_WHOLE: they are STEP whole ones.

    Checks of the keys cost as much as the products, so a long prompt has them only at its end.
    """
    i_row = tl.program_id(0) * BLOCK_U
    i_g = tl.program_id(2).to(tl.int64)
    i_head = tl.load(HEADS + i_g).to(tl.int64)
    o_dim = tl.arange(0, D_PAD)
    o_key = tl.arange(0, STEP * TILE)
    o_step = tl.arange(0, STEP)
    o_row = i_row + tl.arange(0, BLOCK_U)
    o_u = first_u + o_row
    m_row = o_row < num_u
    p_q = MEANS + (i_g * num_tiles + o_u.to(tl.int64))[:, None] * D + o_dim[None, :]
    b_q = tl.load(p_q, mask=m_row[:, None] & (o_dim < D)[None, :], other=0.0)
    b_q = (b_q * scale_log2).to(K.dtype.element_ty)  # [U, D]
    last_u = first_u + tl.minimum(i_row + BLOCK_U, num_u) - 1
    begin = first_v + tl.program_id(1) * TILES_PER_PROGRAM
    end = tl.minimum(tl.minimum(begin + TILES_PER_PROGRAM, last_u + 1), end_v)
    p_k = K + (i_head // group) * stride_kh
    p_k += o_key.to(tl.int64)[:, None] * stride_kn + o_dim.to(tl.int64)[None, :] * stride_kd
    p_out = SCORES + (i_g * num_u + o_row[:, None]) * num_tiles + o_step[None, :]
    for v in range(begin, end, STEP):
        p_tile = p_k + tl.cast(v * TILE, tl.int64) * stride_kn
        m_key = v * TILE + o_key < n
        if not IS_WHOLE:
            b_k = tl.load(p_tile, mask=m_key[:, None] & (o_dim < D)[None, :], other=0.0)
        elif D < D_PAD:
            b_k = tl.load(p_tile, mask=(o_dim < D)[None, :], other=0.0)
        else:
            b_k = tl.load(p_tile)
        b_score = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        if not IS_WHOLE:
            b_score = tl.where(m_key[None, :], b_score, float("-inf"))
        b_score = tl.reshape(b_score, [BLOCK_U, STEP, TILE])
        b_max = tl.max(b_score, 2)
        if not IS_WHOLE:
            b_max = tl.where(b_max == float("-inf"), 0.0, b_max)  # a tile beyond the last
        b_sum = tl.sum(tl.exp2(b_score - b_max[:, :, None]), 2)
        if not IS_WHOLE:
            b_sum = tl.where(b_sum > 0, b_sum, 1.0)
        b_lse = (b_max + tl.log2(b_sum)) * LN_2
        tl.store(p_out + v, b_lse, mask=m_row[:, None] & ((v + o_step)[None, :] <= o_u[:, None]))
