# SPDX-License-Identifier: Apache-2.0
"""Measures a timing table: correctness first, then every case, then the fit's own error."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from patternsearch.errors import EnvironmentLacks, InputError, TimingError
from patternsearch.kernels.attend import AttendPlan
from patternsearch.patterns.candidates import (
    BlockSparse,
    Candidate,
    Dense,
    VerticalSlashLastQ,
    VerticalSlashSpread,
)
from patternsearch.patterns.geometry import effective_blocks, effective_vertical
from patternsearch.progress import Progress, Silent
from patternsearch.timing.cases import Case, Plan, cases
from patternsearch.timing.clocks import Clock, CudaClock, Timing
from patternsearch.timing.devices import gpu_state, require_cuda
from patternsearch.timing.environment import package_version
from patternsearch.timing.gate import check_kernels
from patternsearch.timing.model import held_out_errors
from patternsearch.timing.table import (
    Clocks,
    LaunchSetting,
    TimingRow,
    TimingTable,
    kernel_digest,
    sealed,
)
from patternsearch.timing.tuning import tune
from patternsearch.timing.workload import (
    DenseBackend,
    Inputs,
    LayerKernels,
    ProjectKernels,
    dense_backends,
    device_memory,
    make_inputs,
)

__all__ = ["run_bench"]

_PACKAGES = ("torch", "triton", "flash-attn-4")


def run_bench(
    plan: Plan, *, progress: Progress | None = None, note: Callable[[str], None] | None = None
) -> TimingTable:
    """Measure this machine's GPU.

    Args:
        plan: which shapes.
        progress: receives the tasks ``check`` and ``measure``.
        note: told one line each what a person should know: a backend that does not run here.

    Raises:
        EnvironmentLacks: no CUDA GPU, or not enough of its memory.
        CheckFailed: a kernel is wrong; nothing is measured.
        InputError: the plan is empty or its heads do not divide.
    """
    require_cuda("measuring times")
    session = Session(
        plan=plan,
        device=torch.device("cuda", torch.cuda.current_device()),
        clock=CudaClock(),
        kernels=ProjectKernels(),
        others=(ProjectKernels("flash4"),) if package_version("flash-attn-4") else (),
        progress=progress or Silent(),
        note=note or (lambda _: None),
    )
    return session.table()


@dataclass
class Session:
    """One run of the benchmark; :func:`run_bench` is the entry, tests put a CPU in.

    Attributes:
        plan: which shapes.
        device: where everything runs.
        clock: what times a call.
        kernels: the sparse kernels; they build every plan.
        others: further backends, timed on the same plans where they have a kernel.
        progress: receives progress.
        note: told one line each.
    """

    plan: Plan
    device: torch.device
    clock: Clock
    kernels: LayerKernels
    others: tuple[LayerKernels, ...] = ()
    progress: Progress = field(default_factory=Silent)
    note: Callable[[str], None] = lambda _: None

    def __post_init__(self) -> None:
        plan = self.plan
        if not plan.lengths or not plan.head_dims:
            raise InputError("nothing to measure: give at least one length and one head_dim")
        if plan.num_query_heads % plan.num_kv_heads:
            raise InputError(
                f"{plan.num_query_heads} query heads are not a multiple of {plan.num_kv_heads} kv "
                f"heads: give a multiple"
            )
        self._dtype = _dtype(plan.dtype)
        self._rows: dict[str, TimingRow] = {}
        self._others: dict[int, list[LayerKernels]] = {}
        self._clocks: list[int] = []
        self._memory_mhz: int | None = None
        self._driver: str | None = None

    def table(self) -> TimingTable:
        """Check, measure and seal."""
        backends = self._check()
        settings: list[LaunchSetting] = []
        lengths = sorted({*self.plan.lengths, *self.plan.held_out_lengths})
        total = len(self.plan.head_dims) * sum(len(list(cases(n, self.plan))) for n in lengths)
        self.progress.start("measure", total, "cases")
        for head_dim in self.plan.head_dims:
            settings += tune(self.kernels, self.clock, self.plan, head_dim, self.device)
            for n in lengths:
                self._look_at_clocks()
                self._measure_length(n, head_dim, backends[head_dim])
        self.progress.finish("measure")
        parts: dict[str, Any] = {
            **self._machine(),
            "kernel_sha256": kernel_digest(),
            "is_quick": self.plan.is_quick,
            "settings": tuple(settings),
            "rows": tuple(self._rows.values()),
            "errors": (),
        }
        return sealed(**{**parts, "errors": held_out_errors(sealed(**parts))})

    # --- steps -----------------------------------------------------------------------------

    def _check(self) -> dict[int, list[DenseBackend]]:
        """Run the correctness gate; return the dense backends that run at each head_dim."""
        found: dict[int, list[DenseBackend]] = {}
        self.progress.start("check", len(self.plan.head_dims), "head dims")
        for head_dim in self.plan.head_dims:
            found[head_dim] = list(self._running_backends(head_dim))
            shape: dict[str, Any] = {
                "head_dim": head_dim, "dtype": self._dtype, "device": self.device,
            }  # fmt: skip
            check_kernels(self.kernels, found[head_dim], **shape)
            self._others[head_dim] = []
            for kernels in self.others:
                try:
                    check_kernels(kernels, [], **shape)
                except EnvironmentLacks as error:
                    self.note(f"{kernels.name} is left out at head_dim {head_dim}: {error}")
                else:
                    self._others[head_dim].append(kernels)
            self.progress.advance("check", 1, f"head_dim {head_dim}")
        self.progress.finish("check")
        return found

    def _running_backends(self, head_dim: int) -> Iterator[DenseBackend]:
        q, k, v = make_inputs(256, head_dim, 4, 2, self._dtype, self.device)[0]
        waiting = dense_backends(self.device)
        while waiting:
            backend = waiting.pop(0)
            try:
                backend.run(q, k, v, head_dim**-0.5)
            except (RuntimeError, AssertionError, NotImplementedError) as error:
                reason = str(error).strip().splitlines()[0] if str(error).strip() else "no reason"
                self.note(f"{backend.name} does not run at head_dim {head_dim}: {reason}")
                if backend.otherwise is not None:
                    waiting.insert(0, backend.otherwise)
            else:
                yield backend

    def _measure_length(self, n: int, head_dim: int, dense: list[DenseBackend]) -> None:
        plan = self.plan
        heads = (plan.num_query_heads, plan.num_kv_heads)
        with device_memory(self.device, f"{heads[0]} heads of {head_dim} at {n} tokens"):
            inputs = make_inputs(n, head_dim, *heads, self._dtype, self.device)
            for case in cases(n, plan):
                if isinstance(case.candidate, Dense):
                    self._measure_dense(case, n, head_dim, inputs, dense)
                else:
                    self._measure_sparse(case, n, head_dim, inputs)
                self.progress.advance("measure", 1, f"head_dim {head_dim}, {n} tokens")

    def _measure_dense(
        self, case: Case, n: int, head_dim: int, inputs: Inputs, backends: list[DenseBackend]
    ) -> None:
        scale = head_dim**-0.5
        for backend in backends:
            run = partial(_call, backend.run, inputs, scale)
            self._add("dense", backend.name, n, head_dim, case.held_out, self.clock.measure(run))
        plan = self._build(case.candidate, inputs, scale)
        run = partial(_attend, self.kernels, inputs, scale, plan)
        timing = self.clock.measure(run)
        self._add("dense", self.kernels.name, n, head_dim, case.held_out, timing)

    def _measure_sparse(self, case: Case, n: int, head_dim: int, inputs: Inputs) -> None:
        candidate, scale = case.candidate, head_dim**-0.5
        assert not isinstance(candidate, Dense)
        if case.measures_index:
            rows, budget = _index_features(candidate, n)
            values: dict[str, Any] = {"tile": candidate.tile, "rows": rows, "budget": budget}
            estimator = getattr(candidate, "estimator", None)
            op = f"index_{estimator}"
            if self._is_new(op, n, head_dim, case.held_out, **values):
                timing = self.clock.measure(
                    lambda i: self._build(candidate, inputs, scale, repetition=i)
                )
                self._add(op, self.kernels.name, n, head_dim, case.held_out, timing, **values)
        if case.measures_kernel:
            plan = self._build(candidate, inputs, scale)
            counts = plan.counts()
            values = {
                "tile": candidate.tile,
                "tiles": round(float(counts.tiles.double().mean()), 3),
                "columns": round(float(counts.columns.double().mean()), 3),
            }
            op = f"attend_{candidate.kind}"
            if self._is_new(op, n, head_dim, case.held_out, **values):
                for kernels in (self.kernels, *self._others[head_dim]):
                    if kernels.runs(candidate):
                        run = partial(_attend, kernels, inputs, scale, plan)
                        timing = self.clock.measure(run)
                        self._add(op, kernels.name, n, head_dim, case.held_out, timing, **values)

    def _build(
        self, candidate: Candidate, inputs: Inputs, scale: float, repetition: int = 0
    ) -> AttendPlan:
        q, k, _ = inputs[repetition]
        return self.kernels.plan([candidate] * self.plan.num_query_heads, q, k, scale)

    # --- bookkeeping -----------------------------------------------------------------------

    def _row(
        self,
        op: str,
        backend: str,
        n: int,
        head_dim: int,
        held_out: bool,
        timing: Timing,
        **values: Any,
    ) -> TimingRow:
        parts: dict[str, Any] = {
            "op": op,
            "backend": backend,
            "dtype": self.plan.dtype,
            "head_dim": head_dim,
            "num_tokens": n,
            "num_query_heads": self.plan.num_query_heads,
            "num_kv_heads": self.plan.num_kv_heads,
            **dict.fromkeys(("tile", "rows", "budget", "tiles", "columns")),
            "held_out": held_out,
            "repetitions": timing.repetitions,
            "p20_ms": timing.p20_ms,
            "p50_ms": timing.p50_ms,
            "p80_ms": timing.p80_ms,
            **values,
        }
        return TimingRow.model_validate(parts)

    def _is_new(self, op: str, n: int, head_dim: int, held_out: bool, **values: Any) -> bool:
        """Return whether neither a row of the fit nor a held-out one measures the same."""
        probe = Timing(1.0, 1.0, 1.0, 1)
        return not any(
            self._row(op, self.kernels.name, n, head_dim, held, probe, **values).identity()
            in self._rows
            for held in (False, held_out)
        )

    def _add(
        self,
        op: str,
        backend: str,
        n: int,
        head_dim: int,
        held_out: bool,
        timing: Timing,
        **values: Any,
    ) -> None:
        row = self._row(op, backend, n, head_dim, held_out, timing, **values)
        self._rows[row.identity()] = row

    def _look_at_clocks(self) -> None:
        if self.device.type != "cuda":
            return
        state = gpu_state(self.device.index or 0)
        self._driver = state.driver
        self._memory_mhz = state.memory_mhz
        if state.sm_mhz:
            self._clocks.append(state.sm_mhz)

    def _machine(self) -> dict[str, Any]:
        self._look_at_clocks()
        if self.device.type == "cuda":
            properties = torch.cuda.get_device_properties(self.device)
            name, capability = properties.name, f"{properties.major}.{properties.minor}"
        else:
            name, capability = self.device.type, "none"
        versions = {package: package_version(package) for package in _PACKAGES}
        return {
            "device": name,
            "compute_capability": capability,
            "driver": self._driver,
            "clocks": Clocks(
                sm_mhz_min=min(self._clocks, default=None),
                sm_mhz_max=max(self._clocks, default=None),
                memory_mhz=self._memory_mhz,
            ),
            "versions": {**versions, "cuda": torch.version.cuda},
        }


def _call(run: Callable[..., Tensor], inputs: Inputs, scale: float, repetition: int) -> Tensor:
    return run(*inputs[repetition], scale)


def _attend(
    kernels: LayerKernels, inputs: Inputs, scale: float, plan: AttendPlan, repetition: int
) -> Tensor:
    return kernels.attend(*inputs[repetition], scale, plan)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TimingError(f"dtype {name!r} is not a torch floating type: give bfloat16 or float16")
    return dtype


def _index_features(candidate: Candidate, n: int) -> tuple[int | None, int]:
    """Return the sampled rows and the budget of an index row."""
    match candidate:
        case VerticalSlashSpread():
            budget = effective_vertical(n, candidate.vertical)
            return candidate.last_q + candidate.spread_rows, budget
        case VerticalSlashLastQ():
            return candidate.last_q, effective_vertical(n, candidate.vertical)
        case BlockSparse():
            return None, effective_blocks(n, candidate.tile, candidate.blocks)
        case _:
            raise AssertionError(f"{candidate.kind} has no index")
