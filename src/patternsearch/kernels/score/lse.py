# SPDX-License-Identifier: Apache-2.0
"""Dense causal attention that also returns the row log-sum-exp, from the fastest op there is.

The score pass needs the log-sum-exp and the model needs the output: one dense pass yields both.
K and V are never repeated: each backend here takes fewer kv heads than query heads as it is. The
backend is chosen by what the inputs allow, before anything runs, and named in the result.
"""

from typing import Literal, NamedTuple, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from patternsearch.errors import EnvironmentLacks, InputError
from patternsearch.kernels._common.checks import (
    check_attention_inputs,
    device_guard,
    padded_head_dim,
)

__all__ = ["AttentionWithLse", "LseBackend", "attention_with_lse", "lse_backends"]

LseBackend = Literal["cudnn", "flash", "triton", "torch_cpu"]
"""Backends: cuDNN's and FlashAttention's torch operators, our own kernel, torch on the CPU."""


class AttentionWithLse(NamedTuple):
    """Dense attention of one layer.

    Attributes:
        out: [1, Hq, n, d] in q's dtype.
        lse: float32 [Hq, n], natural log-sum-exp of each row's scaled causal logits.
        backend: what computed them.
    """

    out: Tensor
    lse: Tensor
    backend: LseBackend


def lse_backends(q: Tensor, k: Tensor, v: Tensor) -> tuple[LseBackend, ...]:
    """Return the backends that can run these inputs on this machine, fastest first."""
    if q.device.type == "cpu":
        return ("torch_cpu",)
    usable: list[LseBackend] = []
    if q.dtype in (torch.float16, torch.bfloat16):
        params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, True)
        if torch.backends.cuda.can_use_cudnn_attention(params):
            usable.append("cudnn")
        # The operator itself wants multiples of 8; torch's front end would pad.
        if q.shape[3] % 8 == 0 and torch.backends.cuda.can_use_flash_attention(params):
            usable.append("flash")
    usable.append("triton")
    return tuple(usable)


def attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, backend: LseBackend | None = None
) -> AttentionWithLse:
    """Return causal attention of one layer, its row log-sum-exp and the backend's name.

    Args:
        q: [1, Hq, n, d], bfloat16, float16 or float32, any strides, d ≤ 256.
        k: [1, Hkv, n, d], not repeated; head h reads kv head h // (Hq / Hkv).
        v: like k.
        scale: factor of the logits.
        backend: force one; None takes the first of :func:`lse_backends`.

    Raises:
        InputError: a shape, dtype or device is not allowed, or ``backend`` is no backend.
        EnvironmentLacks: the forced backend cannot run these inputs here.
    """
    if backend is not None and backend not in get_args(LseBackend):
        raise InputError(f"backend is {backend!r}; allowed are {', '.join(get_args(LseBackend))}.")
    if backend == "triton" or q.device.type != "cpu":
        check_attention_inputs(q, k, v)
    usable = lse_backends(q, k, v)
    if backend is None:
        backend = usable[0]
    elif backend not in usable and not (backend == "triton" and q.device.type == "cpu"):
        raise EnvironmentLacks(
            f"backend {backend} cannot run {q.dtype} head_dim {q.shape[3]} on {q.device}; "
            f"usable here: {', '.join(usable)}."
        )
    with device_guard(q):
        if backend == "cudnn":
            out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(
                q, k, v, None, True, 0.0, True, False, scale=scale
            )[:2]
        elif backend == "flash":
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention(
                q, k, v, 0.0, True, False, scale=scale
            )[:2]
        elif backend == "torch_cpu":
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, True, attn_mask=None, scale=scale
            )
        else:
            out, lse = _attention_triton(q, k, v, scale)
    return AttentionWithLse(out, lse.reshape(q.shape[1], q.shape[2]).float(), backend)


@triton.jit(do_not_specialize=["n"])
def attention_lse_fwd_kernel(
    q, k, v, out, lse,
    stride_q_h, stride_q_n, stride_q_d, stride_k_h, stride_k_n, stride_k_d,
    stride_v_h, stride_v_n, stride_v_d, stride_o_h, stride_o_n, stride_o_d,
    n, group, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Dense causal attention of one block of queries of one head. Grid: (query blocks, Hq)."""
    i_q = tl.num_programs(0) - 1 - tl.program_id(0)  # long programs first
    i_h = tl.program_id(1).to(tl.int64)
    o_q = i_q * BLOCK_Q + tl.arange(0, BLOCK_Q)
    o_d = tl.arange(0, BLOCK_D)
    m_d = (o_d < HEAD_DIM)[None, :]
    m_q = (o_q < n)[:, None] & m_d
    p_q = q + i_h * stride_q_h + o_q.to(tl.int64)[:, None] * stride_q_n
    b_q = tl.load(p_q + o_d[None, :] * stride_q_d, mask=m_q, other=0.0)  # [BLOCK_Q, BLOCK_D]
    b_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_Q], tl.float32)
    b_out = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for i_k in range(0, tl.minimum(n, (i_q + 1) * BLOCK_Q), BLOCK_K):
        o_k = i_k + tl.arange(0, BLOCK_K)
        m_k = (o_k < n)[:, None] & m_d
        o_row = o_k.to(tl.int64)[:, None]
        p_k = k + (i_h // group) * stride_k_h + o_row * stride_k_n + o_d[None, :] * stride_k_d
        p_v = v + (i_h // group) * stride_v_h + o_row * stride_v_n + o_d[None, :] * stride_v_d
        b_k = tl.load(p_k, mask=m_k, other=0.0)  # [BLOCK_K, BLOCK_D]
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale_log2
        b_s = tl.where(o_k[None, :] <= o_q[:, None], b_s, float("-inf"))
        # Key 0 comes first and every row sees it: the maximum is finite from the first block on.
        b_new = tl.maximum(b_max, tl.max(b_s, axis=1))
        b_decay = tl.exp2(b_max - b_new)
        b_p = tl.exp2(b_s - b_new[:, None])
        b_sum = b_sum * b_decay + tl.sum(b_p, axis=1)
        b_v = tl.load(p_v, mask=m_k, other=0.0)
        b_out = b_out * b_decay[:, None]
        b_out += tl.dot(b_p.to(b_v.dtype), b_v, input_precision=PRECISION)
        b_max = b_new
    b_out = b_out / b_sum[:, None]
    p_out = out + i_h * stride_o_h + o_q.to(tl.int64)[:, None] * stride_o_n
    tl.store(p_out + o_d[None, :] * stride_o_d, b_out.to(out.dtype.element_ty), mask=m_q)
    b_lse = (b_max + tl.log2(b_sum)) * 0.6931471805599453  # ln 2
    tl.store(lse + i_h * n + o_q, b_lse, mask=o_q < n)


def _attention_triton(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    _, num_heads, n, dim = q.shape
    out = torch.empty_like(q)
    lse = q.new_empty(num_heads, n, dtype=torch.float32)
    is_full = q.dtype == torch.float32
    block_q, block_k = (32, 32) if is_full or dim > 128 else (64, 64)
    attention_lse_fwd_kernel[(triton.cdiv(n, block_q), num_heads)](
        q, k, v, out, lse,
        *q.stride()[1:], *k.stride()[1:], *v.stride()[1:], *out.stride()[1:],
        n, num_heads // k.shape[1], scale * 1.4426950408889634,  # log2(e)
        HEAD_DIM=dim, BLOCK_D=padded_head_dim(dim), BLOCK_Q=block_q, BLOCK_K=block_k,
        PRECISION="ieee" if is_full else "tf32", num_warps=4, num_stages=2,
    )  # fmt: skip
    return out, lse
