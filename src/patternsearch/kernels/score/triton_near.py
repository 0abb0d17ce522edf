# SPDX-License-Identifier: Apache-2.0
"""What every query row gives to three key tiles near it or first of all, on CUDA."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from patternsearch.kernels._common.checks import check_attention_inputs, device_guard
from patternsearch.kernels.score.triton_launch import ScoreOperands
from patternsearch.patterns.geometry import num_tiles

__all__ = ["launch_near_masses"]


@triton.jit(do_not_specialize=["n"])
def near_masses_fwd_kernel(
    q, k, lse2, masses,
    stride_q_h, stride_q_n, stride_q_d, stride_k_h, stride_k_n, stride_k_d, stride_lse_h,
    n, group, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum each row's probabilities over key tile 0, its own and the one before.

    Grid: (query tiles of 64, heads). ``masses`` is fp32 [heads, n, 3].
    """
    i_u = tl.program_id(0)
    i_h = tl.program_id(1).to(tl.int64)
    o_row = tl.arange(0, 64)
    o_q = i_u * 64 + o_row
    o_d = tl.arange(0, BLOCK_D)
    m_d = (o_d < HEAD_DIM)[None, :]
    m_q = o_q < n
    p_q = q + i_h * stride_q_h
    p_q += o_q.to(tl.int64)[:, None] * stride_q_n + o_d[None, :] * stride_q_d
    b_q = tl.load(p_q, mask=m_q[:, None] & m_d, other=0.0)
    b_lse = tl.load(lse2 + i_h * stride_lse_h + o_q, mask=m_q, other=float("inf"))
    p_k = k + (i_h // group) * stride_k_h + o_d[None, :] * stride_k_d
    p_masses = masses + (i_h * n + o_q) * 3
    for which in tl.static_range(3):
        # Tile 0, the own one, the one before; tile 0 counts once.
        i_v = i_u * 0 if which == 0 else tl.maximum(i_u + 1 - which, 0)
        end = n if which == 0 else tl.where(i_v > 0, n, 0)
        o_k = i_v * 64 + o_row
        p_tile = p_k + o_k.to(tl.int64)[:, None] * stride_k_n
        b_k = tl.load(p_tile, mask=(o_k < end)[:, None] & m_d, other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_p = tl.exp2(b_s * scale_log2 - b_lse[:, None])
        b_p = tl.where((o_k[None, :] <= o_q[:, None]) & (o_k < end)[None, :], b_p, 0.0)
        tl.store(p_masses + which, tl.sum(b_p, axis=1), mask=m_q)


def launch_near_masses(q: Tensor, k: Tensor, *, scale: float, lse: Tensor) -> Tensor:
    """Return what :func:`patternsearch.kernels.score.sampled.near_masses` does.

    Raises:
        InputError: a shape, dtype or device is not allowed.
        EnvironmentLacks: there is no CUDA device and Triton does not interpret.
    """
    check_attention_inputs(q, k)
    op = ScoreOperands(q=q, k=k, lse=lse, scale=scale)
    masses = torch.empty(op.num_heads, op.n, 3, device=q.device)
    with device_guard(q):
        near_masses_fwd_kernel[(num_tiles(op.n, 64), op.num_heads)](
            op.q[0], op.k[0], op.lse2, masses, *op.strides, op.n, op.group, op.scale_log2,
            **op.constants, num_warps=4, num_stages=1,
        )  # fmt: skip
    return masses
