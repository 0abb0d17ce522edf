# SPDX-License-Identifier: Apache-2.0
"""The main score kernel for Hopper in Gluon: the next tile's product runs under this tile's exp2.

Same contract and results as :func:`patternsearch.kernels.score.triton_kernels.score_fwd_kernel`.
Triton waits for a product before it goes on; here two accumulators take turns, so that the tensor
cores and the exponential unit work at the same time.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

__all__ = ["score_hopper_fwd_kernel"]

# Two builtins have one name in Triton 3.5 and 3.6, another in later releases.
_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
_copy_async = (
    async_copy.async_load
    if hasattr(async_copy, "async_load")
    else async_copy.async_copy_global_to_shared
)


@gluon.jit
def _add_to_buckets(
    b_rest, b_column, p_bucket, p_mass, num_buckets, stride_b, i_u, o_key,
    KIND: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Like its namesake in triton_kernels, for pairs below the diagonal."""
    if KIND == 2:
        b_rest += b_column
    elif KIND >= 0:
        i_t = (i_u * 64) // TILE
        if KIND == 0:
            o_entry = i_t - o_key // TILE
        else:
            o_entry = i_t * TILE + (TILE - 1) - o_key
        b_bucket = gl.load(p_bucket + o_entry).to(gl.int32)
        b_rest += gl.where(b_bucket == num_buckets, b_column, 0.0)
        m_add = (b_bucket > 0) & (b_bucket < num_buckets)
        p_add = p_mass + (b_bucket - 1) * stride_b + o_key
        gl.atomic_add(p_add, b_column, mask=m_add, sem="relaxed")
    return b_rest


@gluon.jit
def _reduce_tile(
    b_s, b_lse, scale_log2, b_plain, b_rest_0, b_rest_1, b_rest_2,
    i_u, is_real, p_segment, num_extra, num_tiles, i_v, o_key, p_plain, stride_b,
    p_bucket_0, p_mass_0, num_buckets_0,
    p_bucket_1, p_mass_1, num_buckets_1,
    p_bucket_2, p_mass_2, num_buckets_2,
    HAS_SEGMENTS: gl.constexpr, HAS_TILE: gl.constexpr,
    KIND_0: gl.constexpr, TILE_0: gl.constexpr,
    KIND_1: gl.constexpr, TILE_1: gl.constexpr,
    KIND_2: gl.constexpr, TILE_2: gl.constexpr,
    KEYS: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """Turn one score tile [BLOCK_K, 64] into probabilities and add their sums everywhere."""
    b_p = gl.exp2(b_s * scale_log2 - gl.expand_dims(b_lse, 0))
    b_sum = gl.sum(b_p, axis=1)  # [BLOCK_K], each key in four lanes
    if HAS_SEGMENTS:
        b_tile = gl.sum(gl.reshape(b_sum, [BLOCK_K // 64, 64]), axis=1)
        b_tile = gl.convert_layout(b_tile, KEYS)
        o_v = i_v + gl.arange(0, BLOCK_K // 64, layout=KEYS)
        p_row = p_segment + (i_u + num_extra).to(gl.int64) * num_tiles
        gl.store(p_row + o_v, b_tile, mask=(o_v < num_tiles) & is_real)
    HAS_OTHER: gl.constexpr = KIND_0 > 0 or KIND_1 > 0 or KIND_2 > 0
    if HAS_TILE:
        if gl.load(p_plain + i_u - i_v) != 0:
            b_plain += b_sum
        else:
            b_column = gl.convert_layout(b_sum, KEYS)
            if KIND_0 == 0:
                b_rest_0 = _add_to_buckets(
                    b_rest_0, b_column, p_bucket_0, p_mass_0, num_buckets_0, stride_b, i_u, o_key,
                    0, TILE_0,
                )  # fmt: skip
            if KIND_1 == 0:
                b_rest_1 = _add_to_buckets(
                    b_rest_1, b_column, p_bucket_1, p_mass_1, num_buckets_1, stride_b, i_u, o_key,
                    0, TILE_1,
                )  # fmt: skip
            if KIND_2 == 0:
                b_rest_2 = _add_to_buckets(
                    b_rest_2, b_column, p_bucket_2, p_mass_2, num_buckets_2, stride_b, i_u, o_key,
                    0, TILE_2,
                )  # fmt: skip
    if HAS_OTHER:
        b_column = gl.convert_layout(b_sum, KEYS)
        if KIND_0 > 0:
            b_rest_0 = _add_to_buckets(
                b_rest_0, b_column, p_bucket_0, p_mass_0, num_buckets_0, stride_b, i_u, o_key,
                KIND_0, TILE_0,
            )  # fmt: skip
        if KIND_1 > 0:
            b_rest_1 = _add_to_buckets(
                b_rest_1, b_column, p_bucket_1, p_mass_1, num_buckets_1, stride_b, i_u, o_key,
                KIND_1, TILE_1,
            )  # fmt: skip
        if KIND_2 > 0:
            b_rest_2 = _add_to_buckets(
                b_rest_2, b_column, p_bucket_2, p_mass_2, num_buckets_2, stride_b, i_u, o_key,
                KIND_2, TILE_2,
            )  # fmt: skip
    return b_plain, b_rest_0, b_rest_1, b_rest_2


@gluon.jit
def _copy_tile(s_q, p_tile, i_slot):
    _copy_async(s_q.index(i_slot), p_tile)
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["n", "num_buckets_0", "num_buckets_1", "num_buckets_2"])
def score_hopper_fwd_kernel(
    q, k, lse2, segment_mass, plain,
    bucket_0, mass_0, num_buckets_0,
    bucket_1, mass_1, num_buckets_1,
    bucket_2, mass_2, num_buckets_2,
    stride_q_h, stride_q_n, stride_k_h, stride_k_n,
    stride_lse_h, stride_segment_h, stride_bucket_0, stride_bucket_1, stride_bucket_2,
    n, group, scale_log2,
    HEAD_DIM: gl.constexpr, BLOCK_K: gl.constexpr, NUM_STAGES: gl.constexpr,
    HAS_SEGMENTS: gl.constexpr, HAS_TILE: gl.constexpr,
    KIND_0: gl.constexpr, TILE_0: gl.constexpr,
    KIND_1: gl.constexpr, TILE_1: gl.constexpr,
    KIND_2: gl.constexpr, TILE_2: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Reduce one block of keys against the whole query tiles of one region below its diagonal.

    Grid: (key blocks, Hq, 4). ``lse2`` has one more tile, all +inf, behind the last.
    """
    i_block = gl.program_id(0)
    i_h = gl.program_id(1).to(gl.int64)
    i_r = 3 - gl.program_id(2)  # long programs first
    num_tiles = (n + 63) // 64
    i_v = i_block * (BLOCK_K // 64)
    i_u_low = gl.maximum(((i_r * n + 3) // 4 + 63) // 64, i_v + BLOCK_K // 64)
    i_u_high = ((i_r + 1) * n + 3) // 4 // 64
    if i_u_low < i_u_high:
        num_extra = 0
        for i_bound in gl.static_range(1, 4):
            num_extra += ((i_bound <= i_r) & (((i_bound * n + 3) // 4) % 64 != 0)).to(gl.int32)

        S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, 64, 16])
        KEYS: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
        LANES: gl.constexpr = HEAD_DIM // 8
        LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [num_warps, 1], [1, 0])
        SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
        dtype: gl.constexpr = q.dtype.element_ty
        s_k = gl.allocate_shared_memory(dtype, [BLOCK_K, HEAD_DIM], SHARED)
        s_q = gl.allocate_shared_memory(dtype, [NUM_STAGES, 64, HEAD_DIM], SHARED)

        o_d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, LOAD))
        o_load = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(1, LOAD))
        o_q = gl.arange(0, 64, layout=gl.SliceLayout(1, LOAD))
        p_k = k + (i_h // group) * stride_k_h + i_block.to(gl.int64) * BLOCK_K * stride_k_n
        # All keys are real: the block lies before a whole query tile.
        o_k = gl.expand_dims(o_load * stride_k_n, 1) + gl.expand_dims(o_d, 0)
        _copy_async(s_k, p_k + o_k)
        o_tile = gl.expand_dims(o_q * stride_q_n, 1) + gl.expand_dims(o_d, 0)
        p_q = q + i_h * stride_q_h
        stride_tile = stride_q_n.to(gl.int64) * 64
        i_u_last = i_u_high - 1
        for i_stage in gl.static_range(NUM_STAGES - 1):
            i_u = gl.minimum(i_u_low + i_stage, i_u_last)
            _copy_tile(s_q, p_q + i_u * stride_tile + o_tile, i_stage)

        o_key = i_block * BLOCK_K + gl.arange(0, BLOCK_K, layout=KEYS)
        stride_b = 4 * n
        n_long = n.to(gl.int64)
        p_lse = lse2 + i_h * stride_lse_h + gl.arange(0, 64, layout=gl.SliceLayout(0, S))
        p_segment = segment_mass + i_h * stride_segment_h
        p_plain = plain + i_h * num_tiles
        p_bucket_0 = bucket_0 + i_h * stride_bucket_0
        p_bucket_1 = bucket_1 + i_h * stride_bucket_1
        p_bucket_2 = bucket_2 + i_h * stride_bucket_2
        p_mass_0 = mass_0 + (i_h * num_buckets_0 * 4 + i_r) * n_long
        p_mass_1 = mass_1 + (i_h * num_buckets_1 * 4 + i_r) * n_long
        p_mass_2 = mass_2 + (i_h * num_buckets_2 * 4 + i_r) * n_long
        b_rest_0 = gl.zeros([BLOCK_K], gl.float32, layout=KEYS)
        b_rest_1 = gl.zeros([BLOCK_K], gl.float32, layout=KEYS)
        b_rest_2 = gl.zeros([BLOCK_K], gl.float32, layout=KEYS)
        b_plain = gl.zeros([BLOCK_K], gl.float32, layout=gl.SliceLayout(1, S))

        async_copy.wait_group(NUM_STAGES - 2)
        fence_async_shared()
        _barrier()
        b_zero = gl.zeros([BLOCK_K, 64], gl.float32, layout=S)
        b_even = warpgroup_mma(
            s_k, s_q.index(0).permute([1, 0]), b_zero, use_acc=False, is_async=True
        )
        b_s_even = warpgroup_mma_wait(0, deps=[b_even])
        b_s_odd = b_zero
        num_real = i_u_high - i_u_low
        for i_pair in range((num_real + 1) // 2):
            i_t = 2 * i_pair
            b_lse = gl.load(p_lse + (i_u_low + i_t) * 64)
            async_copy.wait_group(NUM_STAGES - 3)
            fence_async_shared()
            _barrier()
            b_odd = warpgroup_mma(
                s_k, s_q.index((i_t + 1) % NUM_STAGES).permute([1, 0]), b_s_odd,
                use_acc=False, is_async=True,
            )  # fmt: skip
            i_next = gl.minimum(i_u_low + i_t + NUM_STAGES - 1, i_u_last)
            i_slot = (i_t + NUM_STAGES - 1) % NUM_STAGES
            _copy_tile(s_q, p_q + i_next * stride_tile + o_tile, i_slot)
            b_plain, b_rest_0, b_rest_1, b_rest_2 = _reduce_tile(
                b_s_even, b_lse, scale_log2, b_plain, b_rest_0, b_rest_1, b_rest_2,
                i_u_low + i_t, True, p_segment, num_extra, num_tiles, i_v, o_key, p_plain,
                stride_b,
                p_bucket_0, p_mass_0, num_buckets_0,
                p_bucket_1, p_mass_1, num_buckets_1,
                p_bucket_2, p_mass_2, num_buckets_2,
                HAS_SEGMENTS, HAS_TILE, KIND_0, TILE_0, KIND_1, TILE_1, KIND_2, TILE_2,
                KEYS, BLOCK_K,
            )  # fmt: skip
            b_s_odd = warpgroup_mma_wait(0, deps=[b_odd])

            # The odd tile; past the end it reads the last tile again under an lse of +inf: p = 0.
            i_t += 1
            is_real = i_t < num_real
            i_u = gl.minimum(i_u_low + i_t, i_u_last)
            b_lse = gl.load(p_lse + gl.where(is_real, i_u, num_tiles) * 64)
            async_copy.wait_group(NUM_STAGES - 3)
            fence_async_shared()
            _barrier()
            b_even = warpgroup_mma(
                s_k, s_q.index((i_t + 1) % NUM_STAGES).permute([1, 0]), b_s_even,
                use_acc=False, is_async=True,
            )  # fmt: skip
            i_next = gl.minimum(i_u_low + i_t + NUM_STAGES - 1, i_u_last)
            i_slot = (i_t + NUM_STAGES - 1) % NUM_STAGES
            _copy_tile(s_q, p_q + i_next * stride_tile + o_tile, i_slot)
            b_plain, b_rest_0, b_rest_1, b_rest_2 = _reduce_tile(
                b_s_odd, b_lse, scale_log2, b_plain, b_rest_0, b_rest_1, b_rest_2,
                i_u, is_real, p_segment, num_extra, num_tiles, i_v, o_key, p_plain, stride_b,
                p_bucket_0, p_mass_0, num_buckets_0,
                p_bucket_1, p_mass_1, num_buckets_1,
                p_bucket_2, p_mass_2, num_buckets_2,
                HAS_SEGMENTS, HAS_TILE, KIND_0, TILE_0, KIND_1, TILE_1, KIND_2, TILE_2,
                KEYS, BLOCK_K,
            )  # fmt: skip
            b_s_even = warpgroup_mma_wait(0, deps=[b_even])
        async_copy.wait_group(0)
        b_plain_keys = gl.convert_layout(b_plain, KEYS)
        if KIND_0 >= 0:
            if KIND_0 == 0:
                b_rest_0 += b_plain_keys
            gl.store(p_mass_0 + (num_buckets_0 - 1) * stride_b + o_key, b_rest_0)
        if KIND_1 >= 0:
            if KIND_1 == 0:
                b_rest_1 += b_plain_keys
            gl.store(p_mass_1 + (num_buckets_1 - 1) * stride_b + o_key, b_rest_1)
        if KIND_2 >= 0:
            if KIND_2 == 0:
                b_rest_2 += b_plain_keys
            gl.store(p_mass_2 + (num_buckets_2 - 1) * stride_b + o_key, b_rest_2)
