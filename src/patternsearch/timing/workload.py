# SPDX-License-Identifier: Apache-2.0
"""The work that is timed: inputs that do not stay in the cache, dense backends, sparse layers."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from patternsearch.errors import EnvironmentLacks, PatternsearchError
from patternsearch.kernels.attend import AttendPlan, attend, build_plan, flash4
from patternsearch.kernels.attend.configs import LaunchTuning
from patternsearch.patterns.candidates import Candidate

__all__ = ["DenseBackend", "Inputs", "LayerKernels", "ProjectKernels", "dense_backends",
           "device_limits", "is_device_fault", "make_inputs", "running_backends"]  # fmt: skip

_DEFAULT_CACHE_BYTES = 64 * 2**20
_MAX_SETS = 8


class LayerKernels(Protocol):
    """Builds the index of a layer and attends over it."""

    @property
    def name(self) -> str:
        """Backend name in the table."""

    def runs(self, candidate: Candidate) -> bool:
        """Return whether the backend has a kernel for a candidate."""

    def plan(self, candidates: list[Candidate], q: Tensor, k: Tensor, scale: float) -> AttendPlan:
        """Build the online index of each head and everything the kernel needs."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, plan: AttendPlan) -> Tensor:
        """Return the output [1, Hq, n, d]."""


@dataclass(frozen=True, slots=True)
class ProjectKernels:
    """This project's kernels.

    Attributes:
        name: attention backend; ``torch`` also builds the index in PyTorch.
        tuning: how ``triton`` launches; None takes what is known to be good.
    """

    name: Literal["triton", "torch", "flash4"] = "triton"
    tuning: LaunchTuning | None = None

    def runs(self, candidate: Candidate) -> bool:
        """Return whether the backend has a kernel for a candidate; see :class:`LayerKernels`."""
        return self.name != "flash4" or flash4.takes_pattern(candidate)

    def plan(self, candidates: list[Candidate], q: Tensor, k: Tensor, scale: float) -> AttendPlan:
        """Build a layer's plan; see :class:`LayerKernels`."""
        index: Literal["triton", "torch"] = "torch" if self.name == "torch" else "triton"
        return build_plan(q, k, scale=scale, candidates=candidates, backend=index)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, plan: AttendPlan) -> Tensor:
        """Attend; see :class:`LayerKernels`."""
        return attend(q, k, v, scale=scale, plan=plan, backend=self.name, tuning=self.tuning)[0]


# --- inputs ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Inputs:
    """Sets of q [1, Hq, n, d], k and v [1, Hkv, n, d], together larger than the L2 cache."""

    sets: tuple[tuple[Tensor, Tensor, Tensor], ...]

    def __getitem__(self, repetition: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the set of a repetition; consecutive ones differ."""
        return self.sets[repetition % len(self.sets)]

    def part(self, num_query_heads: int, num_kv_heads: int) -> "Inputs":
        """Return the first heads of every set, not copied."""
        return Inputs(
            tuple(
                (q[:, :num_query_heads], k[:, :num_kv_heads], v[:, :num_kv_heads])
                for q, k, v in self.sets
            )
        )


def make_inputs(
    num_tokens: int,
    head_dim: int,
    num_query_heads: int,
    num_kv_heads: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> Inputs:
    """Draw standard normal inputs, enough sets to exceed twice the device's L2 cache."""
    generator = torch.Generator(device=device).manual_seed(seed)
    elements = num_tokens * head_dim * (num_query_heads + 2 * num_kv_heads)
    wanted = -(-2 * _cache_bytes(device) // (elements * dtype.itemsize))
    sets = []
    for _ in range(max(1, min(_MAX_SETS, wanted))):
        heads = (num_query_heads, num_kv_heads, num_kv_heads)
        shapes = [(1, count, num_tokens, head_dim) for count in heads]
        q, k, v = (
            torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)
            for shape in shapes
        )
        sets.append((q, k, v))
    return Inputs(tuple(sets))


def _cache_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "L2_cache_size", 0)) or _DEFAULT_CACHE_BYTES


# --- dense -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DenseBackend:
    """A dense causal attention.

    Attributes:
        name: in the table.
        run: takes q, k, v and the scale.
        otherwise: what to try where this one does not run.
    """

    name: str
    run: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    otherwise: "DenseBackend | None" = None


def dense_backends(device: torch.device) -> list[DenseBackend]:
    """Return the dense attentions to try: torch's by kernel, and FlashAttention-4 if installed."""
    if device.type != "cuda":
        return [DenseBackend("sdpa_math", _sdpa(None))]
    from torch.nn.attention import SDPBackend

    found = [
        DenseBackend(name, _sdpa(kernel), DenseBackend(f"{name}_repeated_kv", _repeated(kernel)))
        for name, kernel in (
            ("sdpa_cudnn", SDPBackend.CUDNN_ATTENTION),
            ("sdpa_flash", SDPBackend.FLASH_ATTENTION),
        )
    ]
    run = _flash4()
    return [*found, DenseBackend("flash4", run)] if run is not None else found


def running_backends(
    head_dim: int, dtype: torch.dtype, device: torch.device, note: Callable[[str], None]
) -> Iterator[DenseBackend]:
    """Yield the dense attentions that run on a device; the others are named to ``note``."""
    q, k, v = make_inputs(256, head_dim, 4, 2, dtype, device)[0]
    waiting = dense_backends(device)
    while waiting:
        backend = waiting.pop(0)
        try:
            backend.run(q, k, v, head_dim**-0.5)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            note(f"{backend.name} does not run at head_dim {head_dim}: {_first_line(error)}")
            if backend.otherwise is not None:
                waiting.insert(0, backend.otherwise)
        else:
            yield backend


def _sdpa(backend: Any) -> Callable[[Tensor, Tensor, Tensor, float], Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        with _only(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )

    return run


def _repeated(backend: Any) -> Callable[[Tensor, Tensor, Tensor, float], Tensor]:
    """Return the same with k and v repeated in memory, for a torch whose kernel cannot group."""
    grouped = _sdpa(backend)

    def run(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        group = q.shape[1] // k.shape[1]
        return grouped(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), scale)

    return run


def _only(backend: Any) -> AbstractContextManager[Any]:
    if backend is None:
        return nullcontext()
    from torch.nn.attention import sdpa_kernel

    manager: AbstractContextManager[Any] = sdpa_kernel(backend)
    return manager


def _flash4() -> Callable[[Tensor, Tensor, Tensor, float], Tensor] | None:
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError:
        return None

    def run(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        out = flash_attn_func(
            *(x.transpose(1, 2) for x in (q, k, v)), softmax_scale=scale, causal=True
        )
        result: Tensor = (out[0] if isinstance(out, tuple) else out).transpose(1, 2)
        return result

    return run


@contextmanager
def device_limits(device: torch.device, what: str) -> Iterator[None]:
    """Turn what this machine cannot run into a message that names the work.

    Raises:
        EnvironmentLacks: the device's memory or shared memory does not suffice, or no kernel of
            a backend takes these inputs. A fault of the device itself passes through.
    """
    try:
        yield
    except PatternsearchError:
        raise
    except torch.OutOfMemoryError as error:
        raise EnvironmentLacks(
            f"{what} does not fit into the memory of {device} ({_first_line(error)}): "
            f"leave the longest lengths out with --lengths"
        ) from None
    except RuntimeError as error:
        if is_device_fault(error):
            raise
        raise EnvironmentLacks(f"{what} does not run on {device}: {_first_line(error)}") from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "triton":
            raise
        # Too much shared memory, or a kernel that does not compile for this device.
        raise EnvironmentLacks(f"{what} does not run on {device}: {_first_line(error)}") from error


def is_device_fault(error: RuntimeError) -> bool:
    """Return whether the device itself failed; nothing runs on it in this process any more."""
    return "CUDA error" in str(error) or "[CUDA]" in str(error)


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
