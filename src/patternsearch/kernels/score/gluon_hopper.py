# SPDX-License-Identifier: Apache-2.0
"""The main score kernel for Hopper in Gluon: explicit layouts, four barriers a query tile.

Same contract as :func:`patternsearch.kernels.score.triton_kernels.score_fwd_kernel`. What Triton
leaves to its layout passes is said here: a key's sum goes once through shared memory to the one
thread that owns the key, tile sums stay within warps, and bucket loads run under the product.
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
def _bucket(p_bucket, i_u, o_key, KIND: gl.constexpr, TILE: gl.constexpr):
    """Return the bucket of (query tile i_u of 64, key) as int32 [keys]; all below the diagonal."""
    i_t = (i_u * 64) // TILE
    if KIND == 0:
        b_bucket = gl.load(p_bucket + (i_t - o_key // TILE)).to(gl.int32)
    elif KIND == 1:
        b_bucket = gl.load(p_bucket + (i_t * TILE + (TILE - 1) - o_key)).to(gl.int32)
    else:
        b_bucket = o_key
    return b_bucket


@gluon.jit
def _add_to_buckets(
    b_rest, b_column, b_bucket, p_mass, num_buckets, stride_b, o_key, KIND: gl.constexpr
):  # fmt: skip
    """Add column sums to the last bucket, in registers, and to buckets 1..B−1, in memory."""
    if KIND == 2:
        b_rest += b_column
    elif KIND >= 0:
        b_rest += gl.where(b_bucket == num_buckets, b_column, 0.0)
        m_add = (b_bucket > 0) & (b_bucket < num_buckets)
        p_add = p_mass + (b_bucket - 1) * stride_b + o_key
        gl.atomic_add(p_add, b_column, mask=m_add, sem="relaxed")
    return b_rest


@gluon.jit
def _copy_tile(s_q, s_lse, p_tile, p_lse, i_slot):
    _copy_async(s_q.index(i_slot), p_tile)
    _copy_async(s_lse.index(i_slot), p_lse)
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["n", "num_buckets_0", "num_buckets_1", "num_buckets_2"])
def score_hopper_fwd_kernel(
    q, k, neg_lse2, segment_mass,
    bucket_0, mass_0, num_buckets_0,
    bucket_1, mass_1, num_buckets_1,
    bucket_2, mass_2, num_buckets_2,
    stride_q_h, stride_q_n, stride_k_h, stride_k_n,
    stride_lse_h, stride_segment_h, stride_bucket_0, stride_bucket_1, stride_bucket_2,
    n, group, scale_log2,
    HEAD_DIM: gl.constexpr, BLOCK_K: gl.constexpr, NUM_STAGES: gl.constexpr,
    HAS_SEGMENTS: gl.constexpr,
    KIND_0: gl.constexpr, TILE_0: gl.constexpr,
    KIND_1: gl.constexpr, TILE_1: gl.constexpr,
    KIND_2: gl.constexpr, TILE_2: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Reduce one block of keys against the whole query tiles of one region below its diagonal.

    Grid: (key blocks, Hq, 4). Adds to zeros.
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
        LSE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        s_lse = gl.allocate_shared_memory(gl.float32, [NUM_STAGES, 64], LSE)

        o_d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, LOAD))
        o_load = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(1, LOAD))
        o_q = gl.arange(0, 64, layout=gl.SliceLayout(1, LOAD))
        p_k = k + (i_h // group) * stride_k_h + i_block.to(gl.int64) * BLOCK_K * stride_k_n
        # All keys are real: the block lies before a whole query tile.
        o_k = gl.expand_dims(o_load * stride_k_n, 1) + gl.expand_dims(o_d, 0)
        _copy_async(s_k, p_k + o_k)
        o_tile = gl.expand_dims(o_q * stride_q_n, 1) + gl.expand_dims(o_d, 0)
        p_q = q + i_h * stride_q_h
        QUADS: gl.constexpr = gl.BlockedLayout([4], [32], [num_warps], [0])
        p_lse = neg_lse2 + i_h * stride_lse_h + gl.arange(0, 64, layout=QUADS)
        stride_tile = stride_q_n.to(gl.int64) * 64
        for i_stage in gl.static_range(NUM_STAGES - 1):
            i_u = gl.minimum(i_u_low + i_stage, i_u_high - 1)
            _copy_tile(s_q, s_lse, p_q + i_u * stride_tile + o_tile, p_lse + i_u * 64, i_stage)

        o_key = i_block * BLOCK_K + gl.arange(0, BLOCK_K, layout=KEYS)
        stride_b = 4 * n
        n_long = n.to(gl.int64)
        p_segment = segment_mass + i_h * stride_segment_h
        p_bucket_0 = bucket_0 + i_h * stride_bucket_0
        p_bucket_1 = bucket_1 + i_h * stride_bucket_1
        p_bucket_2 = bucket_2 + i_h * stride_bucket_2
        p_mass_0 = mass_0 + (i_h * num_buckets_0 * 4 + i_r) * n_long
        p_mass_1 = mass_1 + (i_h * num_buckets_1 * 4 + i_r) * n_long
        p_mass_2 = mass_2 + (i_h * num_buckets_2 * 4 + i_r) * n_long
        b_rest_0 = gl.zeros([BLOCK_K], gl.float32, layout=KEYS)
        b_rest_1 = gl.zeros([BLOCK_K], gl.float32, layout=KEYS)
        b_rest_2 = gl.zeros([BLOCK_K], gl.float32, layout=KEYS)

        b_zero = gl.zeros([BLOCK_K, 64], gl.float32, layout=S)
        for i_t in range(i_u_high - i_u_low):
            async_copy.wait_group(NUM_STAGES - 2)
            fence_async_shared()
            _barrier()
            i_slot = i_t % NUM_STAGES
            b_s = warpgroup_mma(
                s_k, s_q.index(i_slot).permute([1, 0]), b_zero, use_acc=False, is_async=True
            )
            # All threads are past the barrier, so past the tile before: its slot is free.
            i_next = gl.minimum(i_u_low + i_t + NUM_STAGES - 1, i_u_high - 1)
            _copy_tile(
                s_q, s_lse, p_q + i_next * stride_tile + o_tile, p_lse + i_next * 64,
                (i_t + NUM_STAGES - 1) % NUM_STAGES,
            )  # fmt: skip
            i_u = i_u_low + i_t
            # Loaded under the product.
            b_bucket_0 = _bucket(p_bucket_0, i_u, o_key, KIND_0, TILE_0)
            b_bucket_1 = _bucket(p_bucket_1, i_u, o_key, KIND_1, TILE_1)
            b_bucket_2 = _bucket(p_bucket_2, i_u, o_key, KIND_2, TILE_2)
            b_neg_lse = s_lse.index(i_slot).load(gl.SliceLayout(0, S))
            b_s = warpgroup_mma_wait(0, deps=[b_s])
            b_p = gl.exp2(b_s * scale_log2 + gl.expand_dims(b_neg_lse, 0))
            b_column = gl.convert_layout(gl.sum(b_p, axis=1), KEYS)  # [BLOCK_K], a key a thread
            if HAS_SEGMENTS:
                # A warp has 32 keys; two warps add to one tile of 64, to a zero, so in any order.
                b_part = gl.sum(gl.reshape(b_column, [BLOCK_K // 32, 32]), axis=1)
                o_part = gl.arange(0, BLOCK_K // 32, layout=b_part.type.layout)
                p_row = p_segment + (i_u + num_extra).to(gl.int64) * num_tiles
                gl.atomic_add(p_row + i_v + o_part // 2, b_part, sem="relaxed")
            b_rest_0 = _add_to_buckets(
                b_rest_0, b_column, b_bucket_0, p_mass_0, num_buckets_0, stride_b, o_key, KIND_0
            )
            b_rest_1 = _add_to_buckets(
                b_rest_1, b_column, b_bucket_1, p_mass_1, num_buckets_1, stride_b, o_key, KIND_1
            )
            b_rest_2 = _add_to_buckets(
                b_rest_2, b_column, b_bucket_2, p_mass_2, num_buckets_2, stride_b, o_key, KIND_2
            )
        async_copy.wait_group(0)
        if KIND_0 >= 0:
            gl.store(p_mass_0 + (num_buckets_0 - 1) * stride_b + o_key, b_rest_0)
        if KIND_1 >= 0:
            gl.store(p_mass_1 + (num_buckets_1 - 1) * stride_b + o_key, b_rest_1)
        if KIND_2 >= 0:
            gl.store(p_mass_2 + (num_buckets_2 - 1) * stride_b + o_key, b_rest_2)
