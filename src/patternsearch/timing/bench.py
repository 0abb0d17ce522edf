# SPDX-License-Identifier: Apache-2.0
"""Measures a timing table: correctness first, then every case, then the fit's own error.

What this machine cannot run is skipped and said in the table; what was measured before a run died
is kept and not measured again.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from patternsearch.errors import EnvironmentLacks
from patternsearch.kernels.attend import AttendPlan
from patternsearch.patterns.candidates import (
    BlockSparse,
    Candidate,
    Dense,
    VerticalSlashLastQ,
    VerticalSlashSpread,
    describe,
)
from patternsearch.patterns.geometry import effective_blocks, effective_vertical
from patternsearch.progress import Progress, Silent
from patternsearch.timing.cases import Case, Plan, cases, check_plan
from patternsearch.timing.clocks import Clock, CudaClock, Timing
from patternsearch.timing.devices import require_cuda
from patternsearch.timing.environment import package_version
from patternsearch.timing.execution import launch_tuning
from patternsearch.timing.gate import check_kernels
from patternsearch.timing.journal import Journal, JournalError
from patternsearch.timing.machine import Machine
from patternsearch.timing.model import held_out_errors
from patternsearch.timing.table import (
    Skipped,
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
    device_limits,
    is_device_fault,
    make_inputs,
    running_backends,
)

__all__ = ["run_bench"]

_Result = TypeVar("_Result")


def run_bench(
    plan: Plan,
    *,
    progress: Progress | None = None,
    note: Callable[[str], None] | None = None,
    journal: Path | None = None,
) -> TimingTable:
    """Measure this machine's GPU.

    Args:
        plan: which shapes.
        progress: receives the tasks ``check`` and ``measure``.
        note: told one line each what a person should know: a backend that does not run here, a
            case that was skipped.
        journal: file that keeps what is measured until the table is done, so that the same call
            continues a run that died; None keeps nothing.

    Raises:
        EnvironmentLacks: no CUDA GPU, no head_dim of the plan runs on it, or the GPU failed.
        CheckFailed: a kernel is wrong; nothing is measured.
        InputError: the plan is empty, its heads do not divide, or no kernel takes its dtype.
    """
    check_plan(plan)
    require_cuda("measuring times")
    say = note or (lambda _: None)
    device = torch.device("cuda", torch.cuda.current_device())
    session = Session(
        plan=plan,
        device=device,
        clock=CudaClock(),
        kernels=ProjectKernels(),
        others=(ProjectKernels("flash4"),) if package_version("flash-attn-4") else (),
        progress=progress or Silent(),
        note=say,
        journal=Journal(journal, Machine(device).header(plan), say),
    )
    try:
        return session.table()
    except RuntimeError as error:
        if not is_device_fault(error):
            raise
        kept = "" if journal is None else f"; {journal} keeps what is measured"
        raise EnvironmentLacks(
            f"the GPU failed ({str(error).strip().splitlines()[0]}){kept}: run the same command "
            "again, in a new process"
        ) from error


@dataclass(frozen=True, slots=True)
class Attempt:
    """What is being measured, named as in :class:`patternsearch.timing.table.Skipped`."""

    op: str
    backend: str | None
    head_dim: int
    num_tokens: int
    case: str

    @property
    def name(self) -> str:
        """One line for people and for the journal."""
        with_what = f" with {self.backend}" if self.backend else ""
        return (
            f"{self.op}{with_what}, head_dim {self.head_dim}, {self.num_tokens} tokens, {self.case}"
        )


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
        journal: keeps what is measured.
    """

    plan: Plan
    device: torch.device
    clock: Clock
    kernels: ProjectKernels
    others: tuple[LayerKernels, ...] = ()
    progress: Progress = field(default_factory=Silent)
    note: Callable[[str], None] = lambda _: None
    journal: Journal = field(default_factory=Journal)

    def __post_init__(self) -> None:
        check_plan(self.plan)
        self._dtype: torch.dtype = getattr(torch, self.plan.dtype)
        self._others: dict[int, list[LayerKernels]] = {}
        self._machine = Machine(self.device)

    def table(self) -> TimingTable:
        """Check, measure and seal."""
        backends = self._check()
        lengths = sorted({*self.plan.lengths, *self.plan.held_out_lengths})
        total = len(backends) * sum(len(list(cases(n, self.plan))) for n in lengths)
        self.progress.start("measure", total, "cases")
        untuned = self.kernels
        for head_dim, dense in backends.items():
            self._tune(untuned, head_dim)
            for n in lengths:
                self._machine.look()
                self._measure_length(n, head_dim, dense)
        self.progress.finish("measure")
        if not self.journal.rows:
            raise EnvironmentLacks("nothing could be measured: see the notes above")
        parts: dict[str, Any] = {
            **self._machine.facts(),
            "kernel_sha256": kernel_digest(),
            "is_quick": self.plan.is_quick,
            "settings": tuple(self.journal.settings),
            "rows": tuple(self.journal.rows.values()),
            "skipped": tuple(self.journal.skipped),
            "errors": (),
        }
        return sealed(**{**parts, "errors": held_out_errors(sealed(**parts))})

    # --- steps -----------------------------------------------------------------------------

    def _check(self) -> dict[int, list[DenseBackend]]:
        """Run the correctness gate; return the dense backends of each head_dim that runs."""
        found: dict[int, list[DenseBackend]] = {}
        self.progress.start("check", len(self.plan.head_dims), "head dims")
        for head_dim in self.plan.head_dims:
            backends = list(running_backends(head_dim, self._dtype, self.device, self.note))
            shape: dict[str, Any] = {
                "head_dim": head_dim, "dtype": self._dtype, "device": self.device,
            }  # fmt: skip
            try:
                with device_limits(self.device, f"head_dim {head_dim}"):
                    check_kernels(self.kernels, backends, **shape)
            except EnvironmentLacks as error:
                if len(self.plan.head_dims) == 1:
                    raise
                self.note(f"head_dim {head_dim} is left out: {error}")
                self.progress.advance("check", 1, f"head_dim {head_dim}")
                continue
            found[head_dim] = backends
            self._others[head_dim] = []
            for kernels in self.others:
                try:
                    with device_limits(self.device, kernels.name):
                        check_kernels(kernels, [], **shape)
                except EnvironmentLacks as error:
                    self.note(f"{kernels.name} is left out at head_dim {head_dim}: {error}")
                else:
                    self._others[head_dim].append(kernels)
            self.progress.advance("check", 1, f"head_dim {head_dim}")
        self.progress.finish("check")
        return found

    def _tune(self, kernels: ProjectKernels, head_dim: int) -> None:
        """Find how to launch at this head_dim; everything after is measured that way."""
        known = {(s.head_dim, s.tile, s.has_columns) for s in self.journal.settings}
        name = f"launch shapes at head_dim {head_dim}"
        try:
            with self.journal.running(name), device_limits(self.device, name):
                for settings in tune(kernels, self.clock, self.plan, head_dim, self.device, known):
                    self.journal.add_settings(settings)
        except JournalError:
            raise
        except EnvironmentLacks as error:
            self.note(f"launch shapes are not compared: {error}")
        tuning = launch_tuning(self.journal.settings)
        self.kernels = replace(kernels, tuning=tuning or None)

    def _measure_length(self, n: int, head_dim: int, dense: list[DenseBackend]) -> None:
        plan = self.plan
        heads = (plan.num_query_heads, plan.num_kv_heads)
        what = f"{heads[0]} heads of {head_dim} at {n} tokens"
        inputs = self._try(
            Attempt("inputs", None, head_dim, n, what),
            lambda: make_inputs(n, head_dim, *heads, self._dtype, self.device),
        )
        for case in cases(n, plan):
            if inputs is not None:
                if isinstance(case.candidate, Dense):
                    self._measure_dense(case, n, head_dim, inputs, dense)
                else:
                    self._measure_sparse(case, n, head_dim, inputs)
            self.progress.advance("measure", 1, f"head_dim {head_dim}, {n} tokens")
        del inputs
        self._free()

    def _measure_dense(
        self, case: Case, n: int, head_dim: int, inputs: Inputs, backends: list[DenseBackend]
    ) -> None:
        scale = head_dim**-0.5
        for backend in backends:
            what = Attempt("dense", backend.name, head_dim, n, "dense")
            run = partial(_call, backend.run, inputs, scale)
            self._measure(what, case.held_out, run)
        what = Attempt("dense", self.kernels.name, head_dim, n, "dense")
        plan = self._try(what, lambda: self._build(case.candidate, inputs, scale))
        if plan is not None:
            self._measure(what, case.held_out, partial(_attend, self.kernels, inputs, scale, plan))

    def _measure_sparse(self, case: Case, n: int, head_dim: int, inputs: Inputs) -> None:
        candidate, scale = case.candidate, head_dim**-0.5
        assert not isinstance(candidate, Dense)
        text = describe(candidate)
        if case.measures_index:
            self._measure_index(candidate, case.held_out, n, head_dim, inputs)
        if not case.measures_kernel:
            return
        what = Attempt(f"attend_{candidate.kind}", self.kernels.name, head_dim, n, text)
        plan = self._try(what, lambda: self._build(candidate, inputs, scale))
        if plan is None:
            return
        counts = plan.counts()
        values = {
            "tile": candidate.tile,
            "tiles": round(float(counts.tiles.double().mean()), 3),
            "columns": round(float(counts.columns.double().mean()), 3),
        }
        for kernels in (self.kernels, *self._others[head_dim]):
            if kernels.runs(candidate):
                run = partial(_attend, kernels, inputs, scale, plan)
                mine = replace(what, backend=kernels.name)
                self._measure(mine, case.held_out, run, **values)

    def _measure_index(
        self, candidate: Candidate, held_out: bool, n: int, head_dim: int, inputs: Inputs
    ) -> None:
        """Time an index of as many heads as share one in a layer of mixed patterns."""
        heads = (self.plan.num_index_query_heads, self.plan.num_index_kv_heads)
        rows, budget = _index_features(candidate, n)
        op = f"index_{getattr(candidate, 'estimator', None)}"
        some = inputs.part(*heads)
        self._measure(
            Attempt(op, self.kernels.name, head_dim, n, describe(candidate)),
            held_out,
            lambda i: self._build(candidate, some, head_dim**-0.5, repetition=i),
            num_query_heads=heads[0],
            num_kv_heads=heads[1],
            tile=getattr(candidate, "tile", None),
            rows=rows,
            budget=budget,
        )

    def _build(
        self, candidate: Candidate, inputs: Inputs, scale: float, repetition: int = 0
    ) -> AttendPlan:
        q, k, _ = inputs[repetition]
        return self.kernels.plan([candidate] * q.shape[1], q, k, scale)

    # --- bookkeeping -----------------------------------------------------------------------

    def _measure(
        self, what: Attempt, held_out: bool, run: Callable[[int], object], **values: Any
    ) -> None:
        """Time a call and keep the row, unless the same was measured before."""
        known = (self._row(what, held, None, values) for held in (False, held_out))
        if any(row.identity() in self.journal.rows for row in known):
            return
        timing = self._try(what, lambda: self.clock.measure(run))
        if timing is not None:
            self.journal.add_row(self._row(what, held_out, timing, values))

    def _row(
        self, what: Attempt, held_out: bool, timing: Timing | None, values: dict[str, Any]
    ) -> TimingRow:
        """Return a row; without a timing, one to compare identities with."""
        parts: dict[str, Any] = {
            "op": what.op,
            "backend": what.backend,
            "dtype": self.plan.dtype,
            "head_dim": what.head_dim,
            "num_tokens": what.num_tokens,
            "num_query_heads": self.plan.num_query_heads,
            "num_kv_heads": self.plan.num_kv_heads,
            **dict.fromkeys(("tile", "rows", "budget", "tiles", "columns")),
            "held_out": held_out,
            **asdict(timing or Timing(1.0, 1.0, 1.0, 1)),
            **values,
        }
        return TimingRow.model_validate(parts)

    def _try(self, what: Attempt, run: Callable[[], _Result]) -> _Result | None:
        """Run something, or say in the table why it is missing and return None."""
        try:
            with self.journal.running(what.name), device_limits(self.device, what.name):
                return run()
        except JournalError:
            raise
        except EnvironmentLacks as error:
            self._skip(what, str(error))
            return None

    def _skip(self, what: Attempt, reason: str) -> None:
        self._free()
        self.note(f"skipped: {reason}")
        self.journal.add_skipped(Skipped(**asdict(what), reason=reason))

    def _free(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _call(run: Callable[..., Tensor], inputs: Inputs, scale: float, repetition: int) -> Tensor:
    return run(*inputs[repetition], scale)


def _attend(
    kernels: LayerKernels, inputs: Inputs, scale: float, plan: AttendPlan, repetition: int
) -> Tensor:
    return kernels.attend(*inputs[repetition], scale, plan)


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
