# SPDX-License-Identifier: Apache-2.0
"""The main score kernel for Hopper in Gluon: one half's product under the other's exponentials.

Same contract as :func:`patternsearch.kernels.score.triton_kernels.score_fwd_kernel`. A program has
256 keys in two halves. While the sums of one half are taken, the tensor cores work on the other.
The sums of four query tiles wait in shared memory and are then reduced at once, a key a thread:
tile masses, and bucket masses in registers.

A product in flight must not cross a loop's back edge: ptxas then waits after each instruction of
it. So the four query tiles of a turn are unrolled, and the pipeline drains once a turn.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = ["BLOCK_KEYS", "hopper_descriptors", "score_hopper_fwd_kernel"]

BLOCK_KEYS = 256
"""Keys of a program."""
_HALF = gl.constexpr(BLOCK_KEYS // 2)
_GROUP = gl.constexpr(4)

# Builtins that were renamed after Triton 3.6.
_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
_copy_async = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_HAS_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


def hopper_descriptors(q: Tensor, k: Tensor) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Return the TMA descriptors of q [1, Hq, n, d] and k [1, Hkv, n, d], a tile of one head each.

    The last stride must be 1, the others multiples of 16 bytes.
    """
    element = gl.bfloat16 if q.dtype == torch.bfloat16 else gl.float16
    both = []
    for x, rows in ((q, 64), (k, BLOCK_KEYS // 2)):
        block = [1, rows, x.shape[3]]
        layout = gl.NVMMASharedLayout.get_default_for(block, element)
        both.append(TensorDescriptor.from_tensor(x[0], block, layout))
    return both[0], both[1]


@gluon.jit
def _view(s_x, shape: gl.constexpr, layout: gl.constexpr):
    if _HAS_REINTERPRET:
        s_view = s_x.reinterpret(s_x.dtype, shape, layout)
    else:
        s_view = s_x._reinterpret(s_x.dtype, shape, layout)
    return s_view


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
    b_rest, b_column, b_bucket, p_mass, num_buckets, stride_b, KIND: gl.constexpr
):  # fmt: skip
    """Add column sums to the last bucket, in registers, and to buckets 1..B−1, in memory."""
    if KIND == 2:
        b_rest += b_column
    elif KIND >= 0:
        b_rest += gl.where(b_bucket == num_buckets, b_column, 0.0)
        m_add = (b_bucket > 0) & (b_bucket < num_buckets)
        gl.atomic_add(p_mass + (b_bucket - 1) * stride_b, b_column, mask=m_add, sem="relaxed")
    return b_rest


@gluon.jit
def _copy_tile(d_q, s_q, s_ready, i_h, i_u):
    mbarrier.expect(s_ready, 64 * d_q.block_shape[2] * 2)
    _copy_async(d_q, [i_h, i_u * 64, 0], s_ready, s_q)


@gluon.jit
def _store_sums(b_s, b_neg_lse, scale_log2, s_column):
    """Store Σ over the queries of P = exp2(S − LSE), one number a key."""
    b_p = gl.exp2(b_s * scale_log2 + gl.expand_dims(b_neg_lse, 0))
    s_column.store(gl.sum(b_p, axis=1))


@gluon.jit
def _product(s_k, s_q, b_zero):
    return warpgroup_mma(s_k, s_q, b_zero, use_acc=False, is_async=True)


@gluon.jit(do_not_specialize=["n", "num_buckets_0", "num_buckets_1", "num_buckets_2"])
def score_hopper_fwd_kernel(
    d_q, d_k, neg_lse2, segment_mass,
    bucket_0, mass_0, num_buckets_0,
    bucket_1, mass_1, num_buckets_1,
    bucket_2, mass_2, num_buckets_2,
    stride_lse_h, stride_segment_h, stride_bucket_0, stride_bucket_1, stride_bucket_2,
    n, group, scale_log2,
    HEAD_DIM: gl.constexpr, HAS_SEGMENTS: gl.constexpr,
    KIND_0: gl.constexpr, TILE_0: gl.constexpr,
    KIND_1: gl.constexpr, TILE_1: gl.constexpr,
    KIND_2: gl.constexpr, TILE_2: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Reduce one block of keys against the whole query tiles of one region below its diagonal.

    Grid: (Hq, key blocks, 4): the last programs to start are the shortest ones, of all heads.
    """
    i_h = gl.program_id(0)
    i_block = gl.program_id(1)
    i_r = 3 - gl.program_id(2)  # long programs first
    BLOCK_K: gl.constexpr = 2 * _HALF
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
        ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [num_warps, 1], [1, 0])
        PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        ready: gl.constexpr = mbarrier.MBarrierLayout()
        s_k0 = gl.allocate_shared_memory(d_k.dtype, [1, _HALF, HEAD_DIM], d_k.layout)
        s_k1 = gl.allocate_shared_memory(d_k.dtype, [1, _HALF, HEAD_DIM], d_k.layout)
        s_q0 = gl.allocate_shared_memory(d_q.dtype, [1, 64, HEAD_DIM], d_q.layout)
        s_q1 = gl.allocate_shared_memory(d_q.dtype, [1, 64, HEAD_DIM], d_q.layout)
        s_half = gl.allocate_shared_memory(gl.float32, [2 * _GROUP, _HALF], PLAIN)
        s_column = _view(s_half, [_GROUP, BLOCK_K], PLAIN)
        s_group = _view(s_half, [_GROUP, BLOCK_K], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        s_ready_k = gl.allocate_shared_memory(gl.int64, [1], ready)
        s_ready_0 = gl.allocate_shared_memory(gl.int64, [1], ready)
        s_ready_1 = gl.allocate_shared_memory(gl.int64, [1], ready)
        mbarrier.init(s_ready_k, count=1)
        mbarrier.init(s_ready_0, count=1)
        mbarrier.init(s_ready_1, count=1)
        fence_async_shared()
        _barrier()
        # All keys are real: the block lies before a whole query tile.
        mbarrier.expect(s_ready_k, BLOCK_K * HEAD_DIM * 2)
        _copy_async(d_k, [i_h // group, i_block * BLOCK_K, 0], s_ready_k, s_k0)
        _copy_async(d_k, [i_h // group, i_block * BLOCK_K + _HALF, 0], s_ready_k, s_k1)
        _copy_tile(d_q, s_q0, s_ready_0, i_h, i_u_low)
        _copy_tile(d_q, s_q1, s_ready_1, i_h, gl.minimum(i_u_low + 1, i_u_high - 1))

        o_key = i_block * BLOCK_K + gl.arange(0, BLOCK_K, layout=KEYS)
        stride_b = 4 * n
        n_long = n.to(gl.int64)
        i_long = i_h.to(gl.int64)
        p_lse = neg_lse2 + i_long * stride_lse_h + gl.arange(0, 64, layout=gl.SliceLayout(0, S))
        p_segment = segment_mass + i_long * stride_segment_h
        p_bucket_0 = bucket_0 + i_long * stride_bucket_0
        p_bucket_1 = bucket_1 + i_long * stride_bucket_1
        p_bucket_2 = bucket_2 + i_long * stride_bucket_2
        p_mass_0 = mass_0 + (i_long * num_buckets_0 * 4 + i_r) * n_long + o_key
        p_mass_1 = mass_1 + (i_long * num_buckets_1 * 4 + i_r) * n_long + o_key
        p_mass_2 = mass_2 + (i_long * num_buckets_2 * 4 + i_r) * n_long + o_key
        b_rest_0 = gl.zeros([BLOCK_K], gl.float32, layout=KEYS)
        b_rest_1 = gl.zeros([BLOCK_K], gl.float32, layout=KEYS)
        b_rest_2 = gl.zeros([BLOCK_K], gl.float32, layout=KEYS)

        b_zero = gl.zeros([_HALF, 64], gl.float32, layout=S)
        s_k0 = s_k0.reshape([_HALF, HEAD_DIM])
        s_k1 = s_k1.reshape([_HALF, HEAD_DIM])
        s_t0 = s_q0.reshape([64, HEAD_DIM]).permute([1, 0])
        s_t1 = s_q1.reshape([64, HEAD_DIM]).permute([1, 0])
        mbarrier.wait(s_ready_k, 0)
        for i_first in range(i_u_low, i_u_high, _GROUP):
            i_use = (i_first - i_u_low) // 2  # how often each query slot was filled before
            mbarrier.wait(s_ready_0, i_use & 1)
            b_a = _product(s_k0, s_t0, b_zero)
            b_b = _product(s_k1, s_t0, b_zero)
            for i_g in gl.static_range(_GROUP):
                # Past the region's last tile this repeats it; those sums are not used.
                i_u = gl.minimum(i_first + i_g, i_u_high - 1)
                i_copy = gl.minimum(i_first + i_g + 2, i_u_high - 1)
                b_neg_lse = gl.load(p_lse + i_u * 64)
                b_s, b_t = warpgroup_mma_wait(1, deps=[b_a, b_b])
                b_b = warpgroup_mma_init(b_t)
                _store_sums(b_s, b_neg_lse, scale_log2, s_half.index(2 * i_g))
                if i_g == _GROUP - 1:
                    b_s = warpgroup_mma_wait(0, deps=[b_b])
                else:
                    if i_g % 2 == 0:
                        mbarrier.wait(s_ready_1, (i_use + i_g // 2) & 1)
                        b_a = _product(s_k0, s_t1, b_zero)
                    else:
                        mbarrier.wait(s_ready_0, (i_use + (i_g + 1) // 2) & 1)
                        b_a = _product(s_k0, s_t0, b_zero)
                    b_s, b_t = warpgroup_mma_wait(1, deps=[b_b, b_a])
                    b_a = warpgroup_mma_init(b_t)
                # Both products of this tile are done, in all warps behind the copy's barrier.
                if i_g % 2 == 0:
                    _copy_tile(d_q, s_q0, s_ready_0, i_h, i_copy)
                else:
                    _copy_tile(d_q, s_q1, s_ready_1, i_h, i_copy)
                _store_sums(b_s, b_neg_lse, scale_log2, s_half.index(2 * i_g + 1))
                if i_g < _GROUP - 1:
                    if i_g % 2 == 0:
                        b_b = _product(s_k1, s_t1, b_zero)
                    else:
                        b_b = _product(s_k1, s_t0, b_zero)
            _barrier()
            for i_g in gl.static_range(_GROUP):
                i_u = gl.minimum(i_first + i_g, i_u_high - 1)
                b_column = s_column.index(i_g).load(KEYS)
                b_column = gl.where(i_first + i_g < i_u_high, b_column, 0.0)
                b_bucket_0 = _bucket(p_bucket_0, i_u, o_key, KIND_0, TILE_0)
                b_bucket_1 = _bucket(p_bucket_1, i_u, o_key, KIND_1, TILE_1)
                b_bucket_2 = _bucket(p_bucket_2, i_u, o_key, KIND_2, TILE_2)
                b_rest_0 = _add_to_buckets(
                    b_rest_0, b_column, b_bucket_0, p_mass_0, num_buckets_0, stride_b, KIND_0
                )
                b_rest_1 = _add_to_buckets(
                    b_rest_1, b_column, b_bucket_1, p_mass_1, num_buckets_1, stride_b, KIND_1
                )
                b_rest_2 = _add_to_buckets(
                    b_rest_2, b_column, b_bucket_2, p_mass_2, num_buckets_2, stride_b, KIND_2
                )
            if HAS_SEGMENTS:
                # 8 neighbouring threads have 8 keys each of one tile.
                b_group = gl.reshape(s_group.load(ROWS), [_GROUP, BLOCK_K // 64, 64])
                b_tile = gl.sum(b_group, axis=2)
                o_u = i_first + gl.arange(0, _GROUP, layout=gl.SliceLayout(1, b_tile.type.layout))
                o_v = gl.arange(0, BLOCK_K // 64, layout=gl.SliceLayout(0, b_tile.type.layout))
                o_row = gl.expand_dims((o_u + num_extra).to(gl.int64) * num_tiles, 1)
                m_row = gl.expand_dims(o_u < i_u_high, 1)
                gl.store(p_segment + i_v + o_row + gl.expand_dims(o_v, 0), b_tile, mask=m_row)
        # The last copies must land before the program ends.
        i_use = gl.cdiv(i_u_high - i_u_low, _GROUP) * (_GROUP // 2)
        mbarrier.wait(s_ready_0, i_use & 1)
        mbarrier.wait(s_ready_1, i_use & 1)
        if KIND_0 >= 0:
            gl.store(p_mass_0 + (num_buckets_0 - 1) * stride_b, b_rest_0)
        if KIND_1 >= 0:
            gl.store(p_mass_1 + (num_buckets_1 - 1) * stride_b, b_rest_1)
        if KIND_2 >= 0:
            gl.store(p_mass_2 + (num_buckets_2 - 1) * stride_b, b_rest_2)
