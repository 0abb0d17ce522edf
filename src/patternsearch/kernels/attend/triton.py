# SPDX-License-Identifier: Apache-2.0
"""Sparse attention forward in Triton: one launch for all heads that share a tile size.

A program owns one head's query tile. It reads key tiles, the diagonal one first, then gathered
columns in chunks; only the diagonal tile needs a causal mask. One running softmax goes through
all of them. On Hopper the tiles come through tensor descriptors and two programs share a
multiprocessor, so that one's softmax hides behind the other's matrix products.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from patternsearch.errors import EnvironmentLacks
from patternsearch.kernels._common.checks import (
    check_attention_inputs,
    device_guard,
    padded_head_dim,
)
from patternsearch.kernels.attend.configs import (
    AttendConfig,
    LaunchTuning,
    launch_configs,
)
from patternsearch.kernels.attend.plan import AttendPlan, TilePlan

__all__ = ["attend_triton"]

LOG2_E = 1.4426950408889634
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _accumulate(b_acc, b_sum, b_max, b_score, b_v, scale_log2, PRECISION: tl.constexpr):
    b_new = tl.maximum(b_max, tl.max(b_score, 1) * scale_log2)  # [Q]
    b_p = tl.exp2(b_score * scale_log2 - b_new[:, None])  # [Q, K]
    b_decay = tl.exp2(b_max - b_new)
    b_sum = b_sum * b_decay + tl.sum(b_p, 1)
    b_acc = b_acc * b_decay[:, None]
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)
    return b_acc, b_sum, b_new


@triton.jit
def _load_rows(
    P, o_row, o_dim, stride_n, stride_d, n,
    D: tl.constexpr, D_PAD: tl.constexpr, WIDE: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    if WIDE:  # a 64-bit product for each row costs the gathers a tenth of their rate
        o_row = o_row.to(tl.int64)
        o_dim = o_dim.to(tl.int64)
    p_rows = P + o_row[:, None] * stride_n + o_dim[None, :] * stride_d
    if BOUNDED:
        return tl.load(p_rows, mask=(o_row < n)[:, None] & (o_dim < D)[None, :], other=0.0)
    if D < D_PAD:
        return tl.load(p_rows, mask=(o_dim < D)[None, :], other=0.0)
    return tl.load(p_rows)


@triton.jit
def _key_tile(t, i_u, count, window, is_diagonal, uses_list, P_LIST):
    implicit = tl.where(t < window, i_u - t, count - 1 - t)
    entry = tl.load(P_LIST + t, mask=uses_list != 0, other=implicit)
    return tl.where(is_diagonal != 0, i_u - entry, entry)


@triton.jit
def attend_fwd_kernel(
    Q, K, V, Q_TMA, K_TMA, V_TMA, OUT, LSE,
    META, TILE_COUNT, COLUMN_COUNT, LISTS, COLUMNS, ORDER,
    n, num_tiles, group, scale_log2,
    stride_qh, stride_qn, stride_qd, stride_kh, stride_kn, stride_kd,
    stride_vh, stride_vn, stride_vd, stride_oh, stride_on, stride_od,
    D: tl.constexpr, D_PAD: tl.constexpr, TILE: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr, USE_TMA: tl.constexpr, WIDE: tl.constexpr, HAS_COLUMNS: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    SPLIT: tl.constexpr = TILE // BLOCK_K
    item = tl.load(ORDER + tl.program_id(0))
    i_g = item // num_tiles
    i_u = item % num_tiles
    p_meta = META + i_g * 8
    i_head = tl.load(p_meta)
    window = tl.load(p_meta + 1).to(tl.int32)
    is_diagonal = tl.load(p_meta + 2).to(tl.int32)
    uses_list = tl.load(p_meta + 3).to(tl.int32)
    p_list = LISTS + tl.load(p_meta + 4) + tl.load(p_meta + 5) * i_u
    count = tl.load(TILE_COUNT + item)
    i_kv = (i_head // group).to(tl.int32)
    if HAS_COLUMNS:  # long before they are needed
        p_column = COLUMNS + tl.load(p_meta + 6) + tl.load(p_meta + 7) * i_u
        num_columns = tl.load(COLUMN_COUNT + item)

    p_k = K + i_kv.to(tl.int64) * stride_kh
    p_v = V + i_kv.to(tl.int64) * stride_vh
    o_dim = tl.arange(0, D_PAD)
    o_row = i_u * TILE + tl.arange(0, TILE)
    o_k = tl.arange(0, BLOCK_K)
    if USE_TMA:
        b_q = Q_TMA.load([i_head.to(tl.int32), i_u * TILE, 0]).reshape(TILE, D_PAD)
    else:
        p_q = Q + i_head * stride_qh
        b_q = _load_rows(p_q, o_row, o_dim, stride_qn, stride_qd, n, D, D_PAD, WIDE, True)

    b_max = tl.full([TILE], float("-inf"), tl.float32)
    b_sum = tl.zeros([TILE], tl.float32)
    b_acc = tl.zeros([TILE, D_PAD], tl.float32)

    for t in tl.range(0, count * SPLIT, num_stages=STAGES):  # key tiles, the diagonal one first
        i_v = _key_tile(t // SPLIT, i_u, count, window, is_diagonal, uses_list, p_list)
        first = i_v * TILE + (t % SPLIT) * BLOCK_K
        if USE_TMA:
            b_k = K_TMA.load([i_kv, first, 0]).reshape(BLOCK_K, D_PAD)
            b_v = V_TMA.load([i_kv, first, 0]).reshape(BLOCK_K, D_PAD)
        else:
            b_k = _load_rows(p_k, first + o_k, o_dim, stride_kn, stride_kd, n, D, D_PAD, WIDE, True)
            b_v = _load_rows(p_v, first + o_k, o_dim, stride_vn, stride_vd, n, D, D_PAD, WIDE, True)
        b_score = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        if t < SPLIT:
            b_score = tl.where(o_row[:, None] >= (first + o_k)[None, :], b_score, float("-inf"))
        b_acc, b_sum, b_max = _accumulate(b_acc, b_sum, b_max, b_score, b_v, scale_log2, PRECISION)

    if HAS_COLUMNS:
        o_c = tl.arange(0, BLOCK_C)
        for c in tl.range(0, num_columns, BLOCK_C, num_stages=STAGES):
            o_key = tl.load(p_column + c + o_c)
            b_k = _load_rows(p_k, o_key, o_dim, stride_kn, stride_kd, n, D, D_PAD, WIDE, False)
            b_v = _load_rows(p_v, o_key, o_dim, stride_vn, stride_vd, n, D, D_PAD, WIDE, False)
            b_score = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
            if c + BLOCK_C > num_columns:
                b_score = tl.where((c + o_c < num_columns)[None, :], b_score, float("-inf"))
            b_acc, b_sum, b_max = _accumulate(
                b_acc, b_sum, b_max, b_score, b_v, scale_log2, PRECISION
            )

    m_row = o_row < n
    b_out = b_acc / b_sum[:, None]
    p_out = OUT + i_head * stride_oh + o_row.to(tl.int64)[:, None] * stride_on
    p_out += o_dim.to(tl.int64)[None, :] * stride_od
    m_out = m_row[:, None] & (o_dim < D)[None, :]
    tl.store(p_out, b_out.to(OUT.dtype.element_ty), mask=m_out)
    tl.store(LSE + i_head * n + o_row, (b_max + tl.log2(b_sum)) * LN_2, mask=m_row)


def attend_triton(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, plan: AttendPlan,
    config: AttendConfig | None = None, tuning: LaunchTuning | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run the plan, which :func:`patternsearch.kernels.attend.attend` has checked against q.

    ``config`` is the only one tried; ``tuning`` comes before the others of its class.

    Raises:
        InputError: a shape, dtype or device is not allowed.
        EnvironmentLacks: there is no CUDA device and Triton does not interpret, or no launch
            configuration fits the device's shared memory.
    """
    check_attention_inputs(q, k, v)
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[1:3], dtype=torch.float32, device=q.device)
    with device_guard(q):
        for part in plan.tile_plans:
            _launch(q, k, v, out, lse, scale, part, config, tuning)
    return out, lse


def _launch(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, part: TilePlan,
    config: AttendConfig | None, tuning: LaunchTuning | None,
) -> None:  # fmt: skip
    configs = (
        [config]
        if config is not None
        else launch_configs(q, k, v, part.tile, part.has_columns, tuning)
    )
    too_large = []
    for choice in configs:
        try:
            _launch_with(q, k, v, out, lse, scale, part, choice)
        except triton.runtime.errors.OutOfResources as error:
            too_large.append(f"{choice}: {error}")
        else:
            return
    raise EnvironmentLacks(
        f"no attention configuration for head_dim {q.shape[-1]}, {q.dtype}, tile {part.tile} fits "
        f"this GPU: {'; '.join(too_large)}. Use a GPU with more shared memory or backend='torch'"
    )


def _launch_with(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, part: TilePlan,
    config: AttendConfig,
) -> None:  # fmt: skip
    _, num_heads, n, head_dim = q.shape
    padded = padded_head_dim(head_dim)
    q_tma, k_tma, v_tma = q, k, v
    if config.use_tma:
        q_tma = TensorDescriptor.from_tensor(q[0], [1, part.tile, padded])
        k_tma = TensorDescriptor.from_tensor(k[0], [1, config.block_k, padded])
        v_tma = TensorDescriptor.from_tensor(v[0], [1, config.block_k, padded])
    attend_fwd_kernel[(part.order.numel(),)](
        q, k, v, q_tma, k_tma, v_tma, out, lse,
        part.meta, part.tile_count, part.column_count, part.lists, part.columns, part.order,
        n, part.tile_count.shape[1], num_heads // k.shape[1], scale * LOG2_E,
        *q.stride()[1:], *k.stride()[1:], *v.stride()[1:], *out.stride()[1:],
        D=head_dim, D_PAD=padded, TILE=part.tile, BLOCK_K=config.block_k,
        BLOCK_C=config.block_c, USE_TMA=config.use_tma, WIDE=_is_wide(q, k, v),
        HAS_COLUMNS=part.has_columns, STAGES=config.num_stages,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps, maxnreg=config.max_registers,
    )  # fmt: skip


def _is_wide(*tensors: Tensor) -> bool:
    """Say whether an element of a head of [1, heads, n, d] lies 2³¹ elements or more into it."""
    return any(
        (x.shape[2] - 1) * x.stride(2) + (x.shape[3] - 1) * x.stride(3) >= 2**31 for x in tensors
    )
