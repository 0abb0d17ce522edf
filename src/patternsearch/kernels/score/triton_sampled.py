# SPDX-License-Identifier: Apache-2.0
"""Column sums of sampled query rows on CUDA: only these rows are multiplied."""

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from patternsearch.kernels._common.checks import check_attention_inputs, device_guard
from patternsearch.kernels.score.sampled import BLOCK_ROWS, unit_rows
from patternsearch.kernels.score.triton_launch import ScoreOperands

__all__ = ["launch_column_sums"]

_SUMS_ELEMENTS = 2**27
"""Largest number of sums held at a time (512 MiB)."""


@triton.jit(do_not_specialize=["n", "num_units", "num_tiles", "num_blocks"])
def column_sums_fwd_kernel(
    q, k, lse2, rows, first_block, sums,
    stride_q_h, stride_q_n, stride_q_d, stride_k_h, stride_k_n, stride_k_d, stride_lse_h,
    stride_sums_h, n, group, scale_log2, num_units, num_tiles, num_blocks,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
    UNITS: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum the probabilities of each unit's rows for one block of keys.

    Grid: (key blocks, heads). ``rows`` is int32 [num_blocks, UNITS, ROWS], −1 for none, with
    UNITS · ROWS = 64; ``first_block`` int32 [key blocks], the first that sees the key block.
    ``sums`` is fp32 [heads, num_tiles, num_units, 64], zero before.
    """
    i_key = tl.program_id(0)
    i_h = tl.program_id(1).to(tl.int64)
    o_slot = tl.arange(0, UNITS * ROWS)
    o_unit = tl.arange(0, UNITS)
    o_key = i_key * BLOCK_K + tl.arange(0, BLOCK_K)
    o_d = tl.arange(0, BLOCK_D)
    m_d = (o_d < HEAD_DIM)[None, :]
    p_k = k + (i_h // group) * stride_k_h + o_key.to(tl.int64)[:, None] * stride_k_n
    m_k = (o_key < n)[:, None] & m_d
    b_k = tl.load(p_k + o_d[None, :] * stride_k_d, mask=m_k, other=0.0)  # [BLOCK_K, BLOCK_D]
    p_q = q + i_h * stride_q_h
    p_lse = lse2 + i_h * stride_lse_h
    p_sums = sums + i_h * stride_sums_h
    p_sums += (o_key // 64).to(tl.int64) * num_units * 64 + o_key % 64
    m_sums = o_key < num_tiles * 64
    for i_b in range(tl.load(first_block + i_key), num_blocks):
        o_q = tl.load(rows + i_b * UNITS * ROWS + o_slot)
        m_q = o_q >= 0
        p_query = p_q + o_q.to(tl.int64)[:, None] * stride_q_n + o_d[None, :] * stride_q_d
        b_q = tl.load(p_query, mask=m_q[:, None] & m_d, other=0.0)
        b_lse = tl.load(p_lse + o_q, mask=m_q, other=float("inf"))
        b_s = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)  # [BLOCK_K, 64]
        b_p = tl.exp2(b_s * scale_log2 - b_lse[None, :])
        b_p = tl.where(o_key[:, None] <= o_q[None, :], b_p, 0.0)
        b_sums = tl.sum(tl.reshape(b_p, (BLOCK_K, UNITS, ROWS)), axis=2)  # [BLOCK_K, UNITS]
        o_out = i_b * UNITS + o_unit
        m_out = m_sums[:, None] & (o_out < num_units)[None, :]
        tl.store(p_sums[:, None] + o_out[None, :] * 64, b_sums, mask=m_out)


def launch_column_sums(
    q: Tensor,
    k: Tensor,
    *,
    scale: float,
    lse: Tensor | None,
    units: Sequence[range],
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield (heads, places in ``units``, sums) piece by piece; a piece's memory is used again.

    See :func:`patternsearch.kernels.score.sampled.unit_column_sums`.

    Raises:
        InputError: a shape, dtype or device is not allowed.
        EnvironmentLacks: there is no CUDA device and Triton does not interpret.
    """
    check_attention_inputs(q, k)
    assert lse is not None, "the triton backend needs the rows' log-sum-exp"
    op = ScoreOperands(q=q, k=k, lse=lse, scale=scale)
    block = 64 if q.dtype == torch.float32 or op.constants["BLOCK_D"] > 128 else 128
    rows = unit_rows(units)
    per_block, places_of_unit = rows.shape[1:]
    last_row = rows.flatten(1).amax(1)
    rows = rows.to(q.device)
    buffer = q.new_empty(0, dtype=torch.float32)
    for heads, places in _pieces(op, len(units), per_block):
        tiles = units[places.stop - 1].start // 64 + 1
        num_heads, num_units = heads.stop - heads.start, places.stop - places.start
        size = num_heads * tiles * num_units * 64
        if len(buffer) < size:
            buffer = q.new_empty(size, dtype=torch.float32)
        part = slice(places.start // per_block, -(-places.stop // per_block))
        key_blocks = torch.arange(0, tiles * 64, block, dtype=torch.int32)
        # Tiles ascend, rows within a tile need not.
        reach = last_row[part].cummax(0).values
        first_block = torch.searchsorted(reach, key_blocks)
        sums = buffer[:size].view(num_heads, tiles, num_units, 64).zero_()
        first_kv = heads.start // op.group
        with device_guard(q):
            column_sums_fwd_kernel[(len(key_blocks), num_heads)](
                q[0, heads], k[0, first_kv:], op.lse2[heads], rows[part],
                first_block.to(torch.int32).to(q.device), sums,
                *op.strides, sums.stride(0), op.n, op.group, op.scale_log2,
                num_units, tiles, part.stop - part.start,
                **op.constants, BLOCK_K=block, UNITS=per_block, ROWS=places_of_unit,
                num_warps=4, num_stages=2,
            )  # fmt: skip
        yield heads, places, sums


def _pieces(op: ScoreOperands, num_units: int, per_block: int) -> Iterator[tuple[slice, slice]]:
    """Cut heads (whole kv groups) and units (whole blocks) into pieces of at most the limit."""
    keys = -(-op.n // BLOCK_ROWS) * BLOCK_ROWS
    step_units = per_block * max(1, _SUMS_ELEMENTS // (keys * op.group * per_block))
    step_units = min(step_units, -(-num_units // per_block) * per_block)
    step_heads = op.group * max(1, _SUMS_ELEMENTS // (keys * op.group * step_units))
    for head in range(0, op.num_heads, step_heads):
        for first in range(0, num_units, step_units):
            yield (
                slice(head, min(head + step_heads, op.num_heads)),
                slice(first, min(first + step_units, num_units)),
            )
