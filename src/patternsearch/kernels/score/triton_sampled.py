# SPDX-License-Identifier: Apache-2.0
"""Column sums of sampled query segments on CUDA: only their rows are multiplied."""

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from patternsearch.kernels._common.checks import check_attention_inputs, device_guard
from patternsearch.kernels.score.triton_launch import ScoreOperands

__all__ = ["launch_column_sums"]

_SUMS_ELEMENTS = 2**27
"""Largest number of sums held at a time (512 MiB)."""


@triton.jit(do_not_specialize=["n", "num_segments", "num_tiles"])
def column_sums_fwd_kernel(
    q, k, lse2, segments, first_segment, sums,
    stride_q_h, stride_q_n, stride_q_d, stride_k_h, stride_k_n, stride_k_d, stride_lse_h,
    stride_sums_h, n, group, scale_log2, num_segments, num_tiles,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum the probabilities of each segment's rows for one block of keys.

    Grid: (key blocks, heads). ``segments`` is int32 [segments, 2]: first row, row past the last,
    ascending; ``first_segment`` int32 [key blocks], the first that sees the block. ``sums`` is
    fp32 [heads, num_tiles, segments, 64], zero before.
    """
    i_block = tl.program_id(0)
    i_h = tl.program_id(1).to(tl.int64)
    o_row = tl.arange(0, 64)
    o_key = i_block * BLOCK_K + tl.arange(0, BLOCK_K)
    o_d = tl.arange(0, BLOCK_D)
    m_d = (o_d < HEAD_DIM)[None, :]
    p_k = k + (i_h // group) * stride_k_h + o_key.to(tl.int64)[:, None] * stride_k_n
    m_k = (o_key < n)[:, None] & m_d
    b_k = tl.load(p_k + o_d[None, :] * stride_k_d, mask=m_k, other=0.0)  # [BLOCK_K, BLOCK_D]
    p_q = q + i_h * stride_q_h
    p_lse = lse2 + i_h * stride_lse_h
    p_sums = sums + i_h * stride_sums_h
    p_sums += (o_key // 64).to(tl.int64) * num_segments * 64 + o_key % 64
    m_sums = o_key < num_tiles * 64
    for i_s in range(tl.load(first_segment + i_block), num_segments):
        row_first = tl.load(segments + i_s * 2)
        row_end = tl.load(segments + i_s * 2 + 1)
        o_q = row_first + o_row
        m_q = o_q < row_end
        p_query = p_q + o_q.to(tl.int64)[:, None] * stride_q_n + o_d[None, :] * stride_q_d
        b_q = tl.load(p_query, mask=m_q[:, None] & m_d, other=0.0)
        b_lse = tl.load(p_lse + o_q, mask=m_q, other=float("inf"))
        b_s = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)  # [BLOCK_K, 64]
        b_p = tl.exp2(b_s * scale_log2 - b_lse[None, :])
        b_p = tl.where(o_key[:, None] <= o_q[None, :], b_p, 0.0)
        tl.store(p_sums + i_s * 64, tl.sum(b_p, axis=1), mask=m_sums)


def launch_column_sums(
    q: Tensor,
    k: Tensor,
    *,
    scale: float,
    lse: Tensor | None,
    segments: Sequence[tuple[int, int]],
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield (heads, places in ``segments``, sums) piece by piece; a piece's memory is used again.

    See :func:`patternsearch.kernels.score.sampled.segment_column_sums`.

    Raises:
        InputError: a shape, dtype or device is not allowed.
        EnvironmentLacks: there is no CUDA device and Triton does not interpret.
    """
    check_attention_inputs(q, k)
    assert lse is not None, "the triton backend needs the rows' log-sum-exp"
    op = ScoreOperands(q=q, k=k, lse=lse, scale=scale)
    block = 64 if q.dtype == torch.float32 or op.constants["BLOCK_D"] > 128 else 128
    buffer = q.new_empty(0, dtype=torch.float32)
    for heads, places in _pieces(op, segments):
        tiles = (segments[places.stop - 1][1] - 1) // 64 + 1
        num_heads, num_segments = heads.stop - heads.start, places.stop - places.start
        size = num_heads * tiles * num_segments * 64
        if len(buffer) < size:
            buffer = q.new_empty(size, dtype=torch.float32)
        part = torch.tensor(segments[places], dtype=torch.int32)
        blocks = torch.arange(0, tiles * 64, block, dtype=torch.int32)
        first_segment = torch.searchsorted(part[:, 1].contiguous(), blocks, right=True)
        sums = buffer[:size].view(num_heads, tiles, num_segments, 64).zero_()
        first_kv = heads.start // op.group
        with device_guard(q):
            column_sums_fwd_kernel[(len(blocks), num_heads)](
                q[0, heads], k[0, first_kv:], op.lse2[heads], part.to(q.device),
                first_segment.to(torch.int32).to(q.device), sums,
                *op.strides, sums.stride(0), op.n, op.group, op.scale_log2, num_segments, tiles,
                **op.constants, BLOCK_K=block, num_warps=4, num_stages=2,
            )  # fmt: skip
        yield heads, places, sums


def _pieces(
    op: ScoreOperands, segments: Sequence[tuple[int, int]]
) -> Iterator[tuple[slice, slice]]:
    """Cut heads (whole kv groups) and segments into pieces of at most the limit."""
    keys = -(-op.n // 64) * 64
    step_segments = max(1, min(len(segments), _SUMS_ELEMENTS // (keys * op.group)))
    step_heads = op.group * max(1, _SUMS_ELEMENTS // (keys * op.group * step_segments))
    for head in range(0, op.num_heads, step_heads):
        for first in range(0, len(segments), step_segments):
            yield (
                slice(head, min(head + step_heads, op.num_heads)),
                slice(first, min(first + step_segments, len(segments))),
            )
