# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-4's block-sparse kernel over the same plans: an optional backend, chosen by name.

It runs whole tiles of 128 × 128 and gathers no columns: dense, A-shape and Block-Sparse heads, all
in one call. Needs the package ``flash-attn-4`` (extra ``fa4``) and a Hopper or Blackwell GPU.
"""

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeGuard

import torch
from torch import Tensor

from patternsearch.errors import EnvironmentLacks, InputError
from patternsearch.kernels._common.checks import device_guard
from patternsearch.kernels._common.upload import head_index
from patternsearch.kernels.attend.plan import (
    META_IS_DIAGONAL,
    META_LIST,
    META_LIST_STRIDE,
    META_USES_LIST,
    META_WINDOW,
    AttendPlan,
    TilePlan,
)
from patternsearch.patterns.candidates import AShape, BlockSparse, Candidate

__all__ = ["attend_flash4", "full_tiles", "is_available", "takes_inputs", "takes_pattern"]

TILE = 128
MAX_HEAD_DIM = 128
"""Wider heads run with other tiles than 128 × 128."""
DTYPES = ("float16", "bfloat16")


def is_available(device: torch.device) -> bool:
    """Return whether the package is installed and the device one that it runs on.

    The package is looked for, not imported.
    """
    return _is_installed() and _runs_on(device)


def takes_inputs(dtype: str, head_dim: int) -> bool:
    """Return whether the kernel takes heads of this torch dtype, by name, and size."""
    return dtype in DTYPES and head_dim <= MAX_HEAD_DIM


def takes_pattern(candidate: Candidate) -> TypeGuard[AShape | BlockSparse]:
    """Return whether the kernel takes a sparse head: whole tiles of 128 and no columns."""
    return isinstance(candidate, AShape | BlockSparse) and candidate.tile == TILE


def attend_flash4(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, plan: AttendPlan
) -> tuple[Tensor, Tensor]:
    """Run the plan, which :func:`patternsearch.kernels.attend.attend` has checked against q.

    Returns:
        out [1, Hq, n, d], in memory [n, Hq, d]; natural-log LSE float32 [Hq, n].

    Raises:
        InputError: the plan gathers columns or has other tiles than 128; float32; d > 128.
        EnvironmentLacks: the package or a GPU of compute capability 9 or 10 is missing.
    """
    if not takes_inputs(str(q.dtype).removeprefix("torch."), q.shape[-1]):
        raise InputError(
            f"flash4 takes float16 and bfloat16 with head_dim up to {MAX_HEAD_DIM}, got {q.dtype} "
            f"with {q.shape[-1]}; use backend='triton'"
        )
    tiles = tuple(part.tile for part in plan.tile_plans)
    if tiles != (TILE,) or plan.tile_plans[0].has_columns:
        columns = any(part.has_columns for part in plan.tile_plans)
        raise InputError(
            f"flash4 runs tiles of {TILE} and no gathered columns; this plan has tiles of {tiles} "
            f"and {'gathers' if columns else 'no'} columns; use backend='triton'"
        )
    attention, tensors_type, causal = _library()
    if not _runs_on(q.device):
        raise EnvironmentLacks(
            f"q is on {q.device}; flash4 needs a GPU of compute capability 9 or 10; "
            "use backend='triton' or 'torch'"
        )
    (part,) = plan.tile_plans
    full_count, full_index = full_tiles(part)
    own = torch.arange(full_count.shape[1], dtype=torch.int32, device=q.device)
    sparse = tensors_type(
        mask_block_cnt=torch.ones_like(own)[None, None],
        mask_block_idx=own[None, None, :, None],
        full_block_cnt=full_count[None],
        full_block_idx=full_index[None],
        block_size=(TILE, TILE),
    )
    with device_guard(q):
        out, lse = attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
            softmax_scale=scale, mask_mod=causal, block_sparse_tensors=sparse, return_lse=True,
            pack_gqa=False,  # packed, the query heads of a kv head would share one list
        )[:2]  # fmt: skip
    return out.transpose(1, 2), lse[0]


def full_tiles(part: TilePlan) -> tuple[Tensor, Tensor]:
    """List the key tiles below the diagonal tile, head by head.

    Returns:
        int32 [Hq, tiles], how many; int32 [Hq, tiles, max_tiles − 1 or 1], which.
    """
    meta, count = part.meta[:, :, None, None], part.tile_count[:, :, None].long()
    u = torch.arange(count.shape[1], device=count.device)[None, :, None]
    t = torch.arange(1, max(part.max_tiles, 2), device=count.device)[None, None, :]
    place = meta[:, META_LIST] + meta[:, META_LIST_STRIDE] * u + t
    entry = part.lists[place.clamp(max=part.lists.numel() - 1)].long()
    listed = torch.where(meta[:, META_IS_DIAGONAL] != 0, u - entry, entry)
    implicit = torch.where(t < meta[:, META_WINDOW], u - t, count - 1 - t)
    tiles = torch.where(meta[:, META_USES_LIST] != 0, listed, implicit)
    tiles = torch.where(t < count, tiles, 0).int()
    row_of_head = sorted(range(len(part.heads)), key=part.heads.__getitem__)
    rows = head_index(row_of_head, count.device).long()
    return (part.tile_count - 1)[rows], tiles[rows]


def _runs_on(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


def _is_installed() -> bool:
    try:
        return all(find_spec(name) is not None for name in ("flash_attn.cute", "cutlass"))
    except ImportError:  # there is no package flash_attn to look into
        return False


@lru_cache(maxsize=1)
def _library() -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    try:
        cute = import_module("cutlass.cute")
        from flash_attn.cute import flash_attn_func
        from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
    except ImportError as error:
        raise EnvironmentLacks(
            f"backend 'flash4' needs the package flash-attn-4, which cannot be imported ({error}); "
            "pip install --pre 'patternsearch[fa4]', or use backend='triton'"
        ) from error

    @cute.jit
    def causal(batch, head, q_index, kv_index, seqlen_info, aux_tensors):
        return kv_index <= q_index

    return flash_attn_func, BlockSparseTensorsTorch, causal
