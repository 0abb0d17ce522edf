# SPDX-License-Identifier: Apache-2.0
"""Check the arguments once, then run the backend that was named."""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from patternsearch.errors import InputError
from patternsearch.kernels.attend.build import IndexBackend, build_plan
from patternsearch.kernels.attend.configs import LaunchTuning
from patternsearch.kernels.attend.plan import AttendPlan
from patternsearch.patterns.candidates import Candidate

__all__ = ["BACKENDS", "Backend", "attend", "sparse_attention"]

Backend = Literal["triton", "torch", "flash4"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)

MAX_HEAD_DIM = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    plan: AttendPlan,
    backend: Backend = "triton",
    tuning: LaunchTuning | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend over exactly the pairs of a plan.

    Args:
        q: [1, Hq, n, d], float16, bfloat16 or float32, any strides; d ≤ 256.
        k: [1, Hkv, n, d], not repeated: kv head of query head h is h // (Hq / Hkv).
        v: like k.
        scale: positive factor of the logits.
        plan: sets for these n tokens and Hq heads, on the tensors' device.
        backend: ``triton``; ``torch``, slow, on any device, for machines without a GPU; or
            ``flash4``, FlashAttention-4's block-sparse kernel, without Vertical-Slash and with
            128×128 tiles only. Never replaced by another one.
        tuning: how ``triton`` launches, as measured on this GPU; None takes what is known to be
            good. It never changes the result.

    Returns:
        out [1, Hq, n, d] in q's dtype and memory order; natural-log LSE float32 [Hq, n].

    Raises:
        InputError: shapes, dtypes, devices, scale or backend are not as above.
        EnvironmentLacks: the backend is not installed or does not fit the device.
    """
    _check(q, k, v, scale, plan)
    if backend == "triton":
        from patternsearch.kernels.attend.triton import attend_triton

        return attend_triton(q, k, v, scale=scale, plan=plan, tuning=tuning)
    if backend == "torch":
        from patternsearch.kernels.attend.chunked import attend_chunked

        return attend_chunked(q, k, v, scale=scale, plan=plan)
    if backend == "flash4":
        from patternsearch.kernels.attend.flash4 import attend_flash4

        return attend_flash4(q, k, v, scale=scale, plan=plan)
    raise InputError(f"unknown attention backend {backend!r}; choose one of {BACKENDS}")


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    candidates: Sequence[Candidate],
    backend: Backend = "triton",
) -> tuple[Tensor, Tensor]:
    """Build the online index of a layer and attend by it.

    Args:
        q: [1, Hq, n, d], float16, bfloat16 or float32, any strides; d ≤ 256.
        k: [1, Hkv, n, d], not repeated.
        v: like k.
        scale: positive factor of the logits.
        candidates: what each query head runs, Hq of them.
        backend: as for :func:`attend`; the index is built by Triton unless it is ``torch``.

    Returns:
        out [1, Hq, n, d] in q's dtype and memory order; natural-log LSE float32 [Hq, n].

    Raises:
        InputError: shapes, dtypes, devices, scale, candidates or backend are not as above.
        EnvironmentLacks: the backend is not installed or does not fit the device.
    """
    index: IndexBackend = "torch" if backend == "torch" else "triton"
    plan = build_plan(q, k, scale=scale, candidates=candidates, backend=index)
    return attend(q, k, v, scale=scale, plan=plan, backend=backend)


def _check(q: Tensor, k: Tensor, v: Tensor, scale: float, plan: AttendPlan) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.ndim != 4 or k.ndim != 4 or q.shape[0] != 1 or k.shape != v.shape:
        raise InputError(f"{shapes}: q must be [1, Hq, n, d], k and v [1, Hkv, n, d]")
    if k.shape[0] != 1 or q.shape[2:] != k.shape[2:] or q.shape[1] % k.shape[1]:
        raise InputError(f"{shapes}: n and d must be equal and Hq a multiple of Hkv")
    if not 1 <= q.shape[3] <= MAX_HEAD_DIM:
        raise InputError(f"head_dim {q.shape[3]} is not supported; it must be 1..{MAX_HEAD_DIM}")
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        raise InputError(
            f"dtypes q {q.dtype}, k {k.dtype}, v {v.dtype}: all three must be the same, one of "
            f"{', '.join(str(dtype) for dtype in DTYPES)}"
        )
    if k.device != q.device or v.device != q.device or plan.device != q.device:
        raise InputError(
            f"q is on {q.device}, k on {k.device}, v on {v.device}, the plan on {plan.device}; "
            "all must be on one device"
        )
    if (plan.n, plan.num_heads) != (q.shape[2], q.shape[1]):
        raise InputError(
            f"the plan is for {plan.num_heads} heads and {plan.n} tokens, q has {q.shape[1]} and "
            f"{q.shape[2]}; build a plan for this q"
        )
    if not scale > 0:
        raise InputError(f"scale {scale} must be positive")
