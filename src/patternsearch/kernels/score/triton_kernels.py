# SPDX-License-Identifier: Apache-2.0
"""The kernels of the score pass: P = exp2(S − LSE), tile by tile, reduced over the queries.

Score tiles have keys as rows and queries as columns, so that a key's sum over the queries stays
within a warp. ``neg_lse2`` is minus the row log-sum-exp times log2(e), [Hq, 64·(tiles + 1)], −inf
past the last row: such a row has p = 0 without a mask.
"""

import triton
import triton.language as tl

__all__ = [
    "KIND_ALL",
    "KIND_NONE",
    "KIND_OFFSET",
    "KIND_TILE",
    "probabilities_fwd",
    "score_edge_fwd_kernel",
    "score_fwd_kernel",
]

KIND_NONE, KIND_TILE, KIND_OFFSET, KIND_ALL = -1, 0, 1, 2
"""Table kinds: no table; by tile diagonal; by e = T·(i//T) − j + T−1; all pairs in bucket 1."""


@triton.jit
def _bucket(
    p_bucket, i_u, o_key, m_key, KIND: tl.constexpr, TILE: tl.constexpr, CHECK: tl.constexpr
):  # fmt: skip
    """Return the bucket of (query tile i_u of 64, key) as int32 [keys]; 0 above the diagonal."""
    i_t = (i_u * 64) // TILE
    if KIND == 0:
        o_entry = i_t - o_key // TILE
    else:
        o_entry = i_t * TILE + (TILE - 1) - o_key
    if CHECK:
        b_bucket = tl.load(p_bucket + o_entry, mask=m_key & (o_entry >= 0), other=0)
    else:
        b_bucket = tl.load(p_bucket + o_entry)
    return b_bucket.to(tl.int32)


@triton.jit
def _add_to_buckets(
    b_rest, b_column, p_bucket, p_mass, num_buckets, stride_b, i_u, o_key,
    KIND: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add column sums to the last bucket, in registers, and to buckets 1..B−1, in memory.

    The program owns its keys and its region: nobody else adds to these addresses.
    """
    if KIND == 2:
        b_rest += b_column
    elif KIND >= 0:
        b_bucket = _bucket(p_bucket, i_u, o_key, None, KIND, TILE, False)
        b_rest += tl.where(b_bucket == num_buckets, b_column, 0.0)
        m_add = (b_bucket > 0) & (b_bucket < num_buckets)
        p_add = p_mass + (b_bucket - 1) * stride_b + o_key
        tl.atomic_add(p_add, b_column, mask=m_add, sem="relaxed")
    return b_rest


@triton.jit
def _store_rest(b_rest, b_plain, p_mass, num_buckets, stride_b, o_key, KIND: tl.constexpr):
    if KIND == 0:
        b_rest += b_plain
    if KIND >= 0:
        tl.store(p_mass + (num_buckets - 1) * stride_b + o_key, b_rest)


@triton.jit
def _extra_segments(i_r, n):
    """Return how many segments precede those of region i_r beside one a tile.

    Each region bound inside a tile adds one.
    """
    num_extra = 0
    for i_bound in tl.static_range(1, 4):
        num_extra += ((i_bound <= i_r) & (((i_bound * n + 3) // 4) % 64 != 0)).to(tl.int32)
    return num_extra


@triton.jit
def probabilities_fwd(
    b_k, p_q, p_lse, i_u, o_key, stride_q_n, stride_q_d, n, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return P of a block of keys and query tile i_u as fp32 [keys, 64].

    With MASK, pairs above the diagonal are 0 and the rows may end before the tile; without it,
    all rows must be real and below the keys.
    """
    o_row = tl.arange(0, 64)
    o_d = tl.arange(0, BLOCK_D)
    p_tile = p_q + i_u.to(tl.int64) * 64 * stride_q_n
    p_tile = p_tile + (o_row[:, None] * stride_q_n + o_d[None, :] * stride_q_d)
    if MASK:
        m_q = (i_u * 64 + o_row < n)[:, None] & (o_d < HEAD_DIM)[None, :]
        b_q = tl.load(p_tile, mask=m_q, other=0.0)  # [64, BLOCK_D]
    elif HEAD_DIM == BLOCK_D:
        b_q = tl.load(p_tile)
    else:
        b_q = tl.load(p_tile, mask=(o_d < HEAD_DIM)[None, :], other=0.0)
    b_neg_lse = tl.load(p_lse + i_u * 64 + o_row)
    b_s = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)
    b_s = b_s * scale_log2 + b_neg_lse[None, :]
    if MASK:
        b_s = tl.where(o_key[:, None] <= (i_u * 64 + o_row)[None, :], b_s, float("-inf"))
    return tl.exp2(b_s)


@triton.jit(do_not_specialize=["n", "num_buckets_0", "num_buckets_1", "num_buckets_2"])
def score_fwd_kernel(
    q, k, neg_lse2, segment_mass, plain,
    bucket_0, mass_0, num_buckets_0,
    bucket_1, mass_1, num_buckets_1,
    bucket_2, mass_2, num_buckets_2,
    stride_q_h, stride_q_n, stride_q_d, stride_k_h, stride_k_n, stride_k_d,
    stride_lse_h, stride_segment_h, stride_bucket_0, stride_bucket_1, stride_bucket_2,
    n, group, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr, HAS_TILE: tl.constexpr,
    KIND_0: tl.constexpr, TILE_0: tl.constexpr,
    KIND_1: tl.constexpr, TILE_1: tl.constexpr,
    KIND_2: tl.constexpr, TILE_2: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Reduce one block of keys against the whole query tiles of one region below the block.

    Grid: (key blocks, Hq, 4). All other query rows are left to :func:`score_edge_fwd_kernel`, which
    runs next. ``plain`` is uint8 [Hq, tiles]: at u − v, v the block's first key tile, 1 if all its
    pairs with query tile u are in the last bucket of every tile table.
    """
    i_block = tl.program_id(0)
    i_h = tl.program_id(1).to(tl.int64)
    i_r = 3 - tl.program_id(2)  # long programs first
    num_tiles = (n + 63) // 64
    i_v = i_block * (BLOCK_K // 64)
    i_u_low = tl.maximum(((i_r * n + 3) // 4 + 63) // 64, i_v + BLOCK_K // 64)
    i_u_high = ((i_r + 1) * n + 3) // 4 // 64
    if i_u_low >= i_u_high:
        return
    num_extra = _extra_segments(i_r, n)
    o_key = i_block * BLOCK_K + tl.arange(0, BLOCK_K)  # all real: a whole query tile is below
    o_d = tl.arange(0, BLOCK_D)
    p_k = k + (i_h // group) * stride_k_h + o_key.to(tl.int64)[:, None] * stride_k_n
    m_d = (o_d < HEAD_DIM)[None, :]
    b_k = tl.load(p_k + o_d[None, :] * stride_k_d, mask=m_d, other=0.0)  # [BLOCK_K, BLOCK_D]

    stride_b = 4 * n
    n_long = n.to(tl.int64)
    p_q = q + i_h * stride_q_h
    p_lse = neg_lse2 + i_h * stride_lse_h
    p_segment = segment_mass + i_h * stride_segment_h
    p_bucket_0 = bucket_0 + i_h * stride_bucket_0
    p_bucket_1 = bucket_1 + i_h * stride_bucket_1
    p_bucket_2 = bucket_2 + i_h * stride_bucket_2
    p_mass_0 = mass_0 + (i_h * num_buckets_0 * 4 + i_r) * n_long
    p_mass_1 = mass_1 + (i_h * num_buckets_1 * 4 + i_r) * n_long
    p_mass_2 = mass_2 + (i_h * num_buckets_2 * 4 + i_r) * n_long
    b_rest_0 = tl.zeros([BLOCK_K], tl.float32)
    b_rest_1 = tl.zeros([BLOCK_K], tl.float32)
    b_rest_2 = tl.zeros([BLOCK_K], tl.float32)
    b_plain = tl.zeros([BLOCK_K], tl.float32)
    p_plain = plain + i_h * num_tiles

    for i_step in range(i_u_high - i_u_low):
        i_u = i_u_low + i_step
        b_p = probabilities_fwd(
            b_k, p_q, p_lse, i_u, o_key, stride_q_n, stride_q_d, n, scale_log2,
            HEAD_DIM, BLOCK_D, False, PRECISION,
        )  # fmt: skip
        b_column = tl.sum(b_p, axis=1)  # [BLOCK_K]
        if HAS_SEGMENTS:
            o_v = i_v + tl.arange(0, BLOCK_K // 64)
            b_tile = tl.sum(tl.reshape(b_column, [BLOCK_K // 64, 64]), axis=1)
            p_row = p_segment + (i_u + num_extra).to(tl.int64) * num_tiles
            tl.store(p_row + o_v, b_tile)
        if HAS_TILE:
            if tl.load(p_plain + i_u - i_v) != 0:
                b_plain += b_column
            else:
                if KIND_0 == 0:
                    b_rest_0 = _add_to_buckets(
                        b_rest_0, b_column, p_bucket_0, p_mass_0, num_buckets_0, stride_b,
                        i_u, o_key, 0, TILE_0,
                    )  # fmt: skip
                if KIND_1 == 0:
                    b_rest_1 = _add_to_buckets(
                        b_rest_1, b_column, p_bucket_1, p_mass_1, num_buckets_1, stride_b,
                        i_u, o_key, 0, TILE_1,
                    )  # fmt: skip
                if KIND_2 == 0:
                    b_rest_2 = _add_to_buckets(
                        b_rest_2, b_column, p_bucket_2, p_mass_2, num_buckets_2, stride_b,
                        i_u, o_key, 0, TILE_2,
                    )  # fmt: skip
        if KIND_0 > 0:
            b_rest_0 = _add_to_buckets(
                b_rest_0, b_column, p_bucket_0, p_mass_0, num_buckets_0, stride_b,
                i_u, o_key, KIND_0, TILE_0,
            )  # fmt: skip
        if KIND_1 > 0:
            b_rest_1 = _add_to_buckets(
                b_rest_1, b_column, p_bucket_1, p_mass_1, num_buckets_1, stride_b,
                i_u, o_key, KIND_1, TILE_1,
            )  # fmt: skip
        if KIND_2 > 0:
            b_rest_2 = _add_to_buckets(
                b_rest_2, b_column, p_bucket_2, p_mass_2, num_buckets_2, stride_b,
                i_u, o_key, KIND_2, TILE_2,
            )  # fmt: skip
    _store_rest(b_rest_0, b_plain, p_mass_0, num_buckets_0, stride_b, o_key, KIND_0)
    _store_rest(b_rest_1, b_plain, p_mass_1, num_buckets_1, stride_b, o_key, KIND_1)
    _store_rest(b_rest_2, b_plain, p_mass_2, num_buckets_2, stride_b, o_key, KIND_2)


@triton.jit
def _add_segment_to_buckets(
    b_column, bucket, mass, num_buckets, stride_bucket, i_h, i_r, i_u, o_key, m_key, n,
    KIND: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    if KIND >= 0:
        p_mass = mass + (i_h * num_buckets * 4 + i_r) * n.to(tl.int64)
        if KIND == 2:
            b_bucket = m_key.to(tl.int32)
        else:
            b_bucket = _bucket(bucket + i_h * stride_bucket, i_u, o_key, m_key, KIND, TILE, True)
        p_add = p_mass + (b_bucket - 1) * (4 * n) + o_key
        tl.atomic_add(p_add, b_column, mask=b_bucket > 0, sem="relaxed")


@triton.jit(do_not_specialize=["n", "num_edges", "num_buckets_0", "num_buckets_1", "num_buckets_2"])
def score_edge_fwd_kernel(
    q, k, neg_lse2, segment_mass, edges,
    bucket_0, mass_0, num_buckets_0,
    bucket_1, mass_1, num_buckets_1,
    bucket_2, mass_2, num_buckets_2,
    stride_q_h, stride_q_n, stride_q_d, stride_k_h, stride_k_n, stride_k_d,
    stride_lse_h, stride_segment_h, stride_bucket_0, stride_bucket_1, stride_bucket_2,
    n, group, scale_log2, num_edges,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr, TILES_PER_BLOCK: tl.constexpr,
    KIND_0: tl.constexpr, TILE_0: tl.constexpr,
    KIND_1: tl.constexpr, TILE_1: tl.constexpr,
    KIND_2: tl.constexpr, TILE_2: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Reduce one tile of 64 keys against the query rows that the main kernel leaves out.

    Those are the tiles on the diagonal of its key blocks, and the segments of less than 64 rows,
    ``edges``, int32 [edges, 4]: first row, row past the last, region, segment index.
    Grid: (tiles of 64 keys, Hq). Runs after the main kernel, on the same outputs.
    """
    i_v = tl.program_id(0)
    i_h = tl.program_id(1).to(tl.int64)
    num_tiles = (n + 63) // 64
    o_key = i_v * 64 + tl.arange(0, 64)
    m_key = o_key < n
    o_d = tl.arange(0, BLOCK_D)
    m_k = m_key[:, None]
    if HEAD_DIM != BLOCK_D:
        m_k = m_k & (o_d < HEAD_DIM)[None, :]
    p_k = k + (i_h // group) * stride_k_h + o_key.to(tl.int64)[:, None] * stride_k_n
    b_k = tl.load(p_k + o_d[None, :] * stride_k_d, mask=m_k, other=0.0)  # [64, BLOCK_D]
    p_q = q + i_h * stride_q_h
    p_lse = neg_lse2 + i_h * stride_lse_h
    i_u_end = tl.minimum((i_v // TILES_PER_BLOCK + 1) * TILES_PER_BLOCK, n // 64)
    num_diagonal = tl.maximum(i_u_end - i_v, 0)
    for i_step in range(num_diagonal + num_edges):
        # A whole tile on the diagonal; its region is that of its ends, or it is among the edges.
        row_first = (i_v + i_step) * 64
        row_end = row_first + 64
        i_r = 4 * row_first // n
        i_segment = i_v + i_step + _extra_segments(i_r, n)
        is_mine = (4 * (row_end - 1) // n == i_r) & (i_step < num_diagonal)
        if i_step >= num_diagonal:
            p_edge = edges + (i_step - num_diagonal) * 4
            row_first = tl.load(p_edge)
            row_end = tl.load(p_edge + 1)
            i_r = tl.load(p_edge + 2)
            i_segment = tl.load(p_edge + 3)
            is_mine = row_first // 64 >= i_v
        i_u = row_first // 64
        if is_mine:
            b_p = probabilities_fwd(
                b_k, p_q, p_lse, i_u, o_key, stride_q_n, stride_q_d, n, scale_log2,
                HEAD_DIM, BLOCK_D, True, PRECISION,
            )  # fmt: skip
            o_q = i_u * 64 + tl.arange(0, 64)
            m_q = (o_q >= row_first) & (o_q < row_end)
            b_column = tl.sum(tl.where(m_q[None, :], b_p, 0.0), axis=1)
            if HAS_SEGMENTS:
                p_row = segment_mass + i_h * stride_segment_h + i_segment.to(tl.int64) * num_tiles
                tl.store(p_row + i_v, tl.sum(b_column))
            _add_segment_to_buckets(
                b_column, bucket_0, mass_0, num_buckets_0, stride_bucket_0, i_h, i_r, i_u,
                o_key, m_key, n, KIND_0, TILE_0,
            )  # fmt: skip
            _add_segment_to_buckets(
                b_column, bucket_1, mass_1, num_buckets_1, stride_bucket_1, i_h, i_r, i_u,
                o_key, m_key, n, KIND_1, TILE_1,
            )  # fmt: skip
            _add_segment_to_buckets(
                b_column, bucket_2, mass_2, num_buckets_2, stride_bucket_2, i_h, i_r, i_u,
                o_key, m_key, n, KIND_2, TILE_2,
            )  # fmt: skip
