# SPDX-License-Identifier: Apache-2.0
"""What every launcher checks before it launches, and how kernels see head dimensions.

Kernels check nothing; a launcher raises :class:`InputError` (a ``ValueError``) with what it got and
what is allowed.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from patternsearch.errors import EnvironmentLacks, InputError

__all__ = [
    "MAX_HEAD_DIM",
    "check_attention_inputs",
    "device_guard",
    "interpreting",
    "padded_head_dim",
]

MAX_HEAD_DIM = 256
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_attention_inputs(q: Tensor, k: Tensor, v: Tensor | None = None) -> None:
    """Check the queries and keys (and values) of one layer for a Triton launcher.

    Args:
        q: [1, Hq, n, d], bfloat16, float16 or float32, any strides.
        k: [1, Hkv, n, d], the same dtype and device, Hkv a divisor of Hq.
        v: like k.

    Raises:
        InputError: a shape, dtype or device is not allowed.
        EnvironmentLacks: the tensors are on a CPU and Triton does not interpret, or it does and
            they are bfloat16.
    """
    others = {"k": k} if v is None else {"k": k, "v": v}
    if q.ndim != 4 or q.shape[0] != 1 or min(q.shape) < 1:
        raise InputError(f"q has shape {tuple(q.shape)}; it must be [1, heads, n, head_dim].")
    _, num_heads, n, dim = q.shape
    if dim > MAX_HEAD_DIM:
        raise InputError(f"head_dim is {dim}; the kernels take at most {MAX_HEAD_DIM}.")
    if q.dtype not in _DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise InputError(f"q has dtype {q.dtype}; allowed are {allowed}.")
    for name, tensor in others.items():
        if tensor.ndim != 4 or tensor.shape[0] != 1 or tensor.shape[2:] != (n, dim):
            raise InputError(
                f"{name} has shape {tuple(tensor.shape)}; with q {tuple(q.shape)} it must be "
                f"[1, kv heads, {n}, {dim}]."
            )
        if tensor.shape[1] < 1 or num_heads % tensor.shape[1]:
            raise InputError(
                f"{name} has {tensor.shape[1]} heads and q {num_heads}; "
                "the kv heads must divide the query heads."
            )
        if tensor.shape[1] != k.shape[1]:
            raise InputError(f"k has {k.shape[1]} heads and {name} {tensor.shape[1]}.")
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise InputError(
                f"{name} is {tensor.dtype} on {tensor.device} and q {q.dtype} on {q.device}; "
                "they must agree."
            )
    if q.device.type != "cuda" and not interpreting():
        raise EnvironmentLacks(
            f"the tensors are on {q.device}; Triton kernels need a CUDA device "
            "(or TRITON_INTERPRET=1 in the environment to interpret them)."
        )
    if q.dtype == torch.bfloat16 and interpreting():
        raise EnvironmentLacks(
            "q is bfloat16 and Triton interprets, where bfloat16 products are wrong; "
            "use float16 or float32, or a CUDA device."
        )


def interpreting() -> bool:
    """Return whether Triton interprets kernels on the CPU."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def device_guard(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's CUDA device current, since Triton launches on the current one."""
    if tensor.device.type == "cuda":
        return torch.cuda.device(tensor.device)
    return nullcontext()


def padded_head_dim(dim: int) -> int:
    """Return the power of two ≥ 16 to which kernels pad the head dimension."""
    return max(16, 1 << (dim - 1).bit_length())
