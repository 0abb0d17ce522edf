"""The benchmark end to end on a CPU with the PyTorch kernels; only its clock is not a GPU's."""

from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch

from patternsearch.errors import CheckFailed, EnvironmentLacks, InputError, TimingError
from patternsearch.patterns.candidates import (
    AShape,
    BlockSparse,
    Dense,
    VerticalSlashLastQ,
    VerticalSlashSpread,
)
from patternsearch.patterns.geometry import a_shape_counts, block_sparse_counts
from patternsearch.timing import workload
from patternsearch.timing.bench import Session, run_bench
from patternsearch.timing.cases import FULL, QUICK, Plan, between, cases
from patternsearch.timing.clocks import Timing, WallClock
from patternsearch.timing.gate import check_kernels
from patternsearch.timing.model import TimeModel
from patternsearch.timing.table import dump_timings, kernel_digest, load_timings
from patternsearch.timing.workload import (
    DenseBackend,
    ProjectKernels,
    dense_backends,
    make_inputs,
    running_backends,
)

CPU = torch.device("cpu")
TINY = Plan(
    lengths=(256, 640),
    held_out_lengths=(448,),
    head_dims=(32,),
    dtype="float32",
    num_query_heads=2,
    num_kv_heads=1,
)


@dataclass
class CountingProgress:
    total: float = 0
    done: float = 0
    finished: int = 0

    def start(self, task, total, unit):
        self.total, self.done = total, 0

    def advance(self, task, amount, note=""):
        self.done += amount

    def finish(self, task):
        assert self.done == self.total
        self.finished += 1


@pytest.fixture(scope="module")
def measured():
    progress = CountingProgress()
    session = Session(
        plan=TINY, device=CPU, clock=WallClock(warm_up=0, repetitions=1),
        kernels=ProjectKernels("torch"), progress=progress,
    )  # fmt: skip
    return session.table(), progress


def test_bench_measures_every_operation_and_finishes_its_progress(measured):
    table, progress = measured
    ops = Counter(row.op for row in table.rows if not row.held_out)
    assert set(ops) == {
        "dense", "index_spread", "index_last_q", "index_pooled_query", "index_pooled",
        "attend_a_shape", "attend_vertical_slash", "attend_block_sparse",
    }  # fmt: skip
    assert {row.backend for row in table.rows if row.op == "dense"} == {"sdpa_math", "torch"}
    assert progress.finished == 2
    assert {row.num_tokens for row in table.rows if row.held_out} >= {448}


def test_bench_counts_what_was_read(measured):
    table, _ = measured
    for row in table.rows:
        if row.op == "attend_a_shape":
            windows = [
                case.candidate.window
                for case in cases(row.num_tokens, TINY)
                if isinstance(case.candidate, AShape)
            ]
            possible = [a_shape_counts(row.num_tokens, row.tile, 128, w)[0] for w in windows]
            assert row.tiles in possible
            assert row.columns == 0
        if row.op == "attend_block_sparse":
            full = block_sparse_counts(row.num_tokens, row.tile, 10**6)[0]
            assert 0 < row.tiles <= full


def test_bench_table_can_be_kept_and_used(measured, tmp_path):
    table, _ = measured
    path = tmp_path / "cpu.json"
    dump_timings(table, path)
    assert load_timings(path) == table
    assert table.kernel_sha256 == kernel_digest()
    assert table.device == "cpu"
    model = TimeModel(table, dtype="float32", head_dim=32)
    tiles = torch.tensor([[20.0]]).numpy()
    assert model.head_cost((AShape(sink=64, window=100, tile=64),), 500, tiles, 0 * tiles)[0, 0] > 0
    assert {error.op for error in table.errors} >= {"all", "dense"}


def test_bench_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EnvironmentLacks, match="needs a CUDA GPU"):
        run_bench(QUICK)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"lengths": ()}, InputError, "at least one length"),
        ({"num_kv_heads": 3}, InputError, "not a multiple of 3"),
        ({"dtype": "int8"}, TimingError, "give bfloat16, float16 or float32"),
        ({"dtype": "bf16"}, TimingError, "give bfloat16, float16 or float32"),
        ({"dtype": "half"}, TimingError, "give bfloat16, float16 or float32"),
        ({"dtype": "float64"}, TimingError, "give bfloat16, float16 or float32"),
    ],
)
def test_bench_refuses_bad_plans(monkeypatch, change, error, message):
    plan = replace(TINY, **change)
    with pytest.raises(error, match=message):
        Session(plan=plan, device=CPU, clock=WallClock(), kernels=None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(error, match=message):  # whatever the machine has
        run_bench(plan)


# --- correctness gate ------------------------------------------------------------------------


class Wrong(ProjectKernels):
    """Kernels that lose a little of every output."""

    def attend(self, q, k, v, scale, plan):
        return super().attend(q, k, v, scale, plan) * (1 - 1e-3)


class Forgetful(ProjectKernels):
    """An index that forgets the diagonal of one candidate and is otherwise right."""

    def plan(self, candidates, q, k, scale):
        if isinstance(candidates[0], Dense):
            candidates = [AShape(sink=64, window=128, tile=64)] * len(candidates)
        return super().plan(candidates, q, k, scale)


GATE = {"head_dim": 32, "dtype": torch.float32, "device": CPU}


def test_right_kernels_pass_the_gate():
    check_kernels(ProjectKernels("torch"), dense_backends(CPU), **GATE)


@pytest.mark.parametrize(
    ("kernels", "message"),
    [(Wrong("torch"), "torch dense is wrong"), (Forgetful("torch"), "every causal pair")],
)
def test_wrong_kernels_are_not_timed(kernels, message):
    class NoClock:
        def measure(self, call):
            raise AssertionError("timed before it was right")

    session = Session(plan=TINY, device=CPU, clock=NoClock(), kernels=kernels)
    with pytest.raises(CheckFailed, match=message):
        session.table()


def test_wrong_dense_backend_is_named():
    def backwards(q, k, v, scale):
        return dense_backends(CPU)[0].run(q, k, v, -scale)

    with pytest.raises(CheckFailed, match="backwards is wrong"):
        check_kernels(ProjectKernels("torch"), [DenseBackend("backwards", backwards)], **GATE)


def test_backend_that_cannot_run_is_left_out_with_its_reason():
    class Missing(ProjectKernels):
        def attend(self, q, k, v, scale, plan):
            raise EnvironmentLacks("not installed")

    notes = []
    session = Session(
        plan=replace(TINY, lengths=(256,), held_out_lengths=()), device=CPU,
        clock=WallClock(warm_up=0, repetitions=1), kernels=ProjectKernels("torch"),
        others=(Missing("flash4"),), note=notes.append,
    )  # fmt: skip
    table = session.table()
    assert {row.backend for row in table.rows} == {"sdpa_math", "torch"}
    assert notes == ["flash4 is left out at head_dim 32: not installed"]


def test_dense_backend_that_fails_gives_way_to_its_other_form(monkeypatch):
    def fails(q, k, v, scale):
        raise RuntimeError("No available kernel.\nMore words.")

    plain = dense_backends(CPU)[0]
    repeated = workload._repeated(None)
    broken = DenseBackend("broken", fails, DenseBackend("broken_repeated_kv", repeated))
    monkeypatch.setattr(workload, "dense_backends", lambda device: [broken, plain])
    notes = []
    found = running_backends(32, torch.float32, CPU, notes.append)
    names = [backend.name for backend in found]
    assert names == ["broken_repeated_kv", "sdpa_math"]
    assert notes == ["broken does not run at head_dim 32: No available kernel."]
    q, k, v = make_inputs(100, 32, 4, 2, torch.float32, CPU)[0]
    torch.testing.assert_close(repeated(q, k, v, 0.2), plain.run(q, k, v, 0.2))


# --- what is measured ------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [FULL, QUICK], ids=["full", "quick"])
def test_cases_span_the_grids_and_stay_within_the_sequence(plan):
    for n in (*plan.lengths, *plan.held_out_lengths):
        found = list(cases(n, plan))
        assert len({case.candidate for case in found}) == len(found)
        assert all(case.measures_index or case.measures_kernel for case in found)
        held = [case for case in found if case.held_out]
        assert held
        if n in plan.held_out_lengths:
            assert held == found
            continue
        fitted = {case.candidate for case in found if not case.held_out}
        for tile in (64, 128):
            kinds = Counter(c.kind for c in fitted if getattr(c, "tile", None) == tile)
            assert kinds["a_shape"] >= 2
            assert kinds["block_sparse"] >= 2
            assert kinds["vertical_slash"] >= 3
            rows = {c.spread_rows for c in fitted
                    if isinstance(c, VerticalSlashSpread) and c.tile == tile}  # fmt: skip
            assert {16, 64} <= rows
            assert any(isinstance(c, VerticalSlashLastQ) and c.tile == tile for c in fitted)
            pooled = {c.estimator for c in fitted if isinstance(c, BlockSparse) and c.tile == tile}
            assert pooled == {"pooled_query", "pooled"}


def test_between_lies_between():
    assert between((1024, 2048, 4096, 8192)) == (1536, 6144)
    assert between((1024,)) == ()
    assert between((1024, 1100)) == ()


def test_wall_clock_orders_its_percentiles():
    seen = []
    timing = WallClock(warm_up=2, repetitions=5).measure(seen.append)
    assert seen == [0, 1, 0, 1, 2, 3, 4]
    assert timing.repetitions == 5
    assert timing.p20_ms <= timing.p50_ms <= timing.p80_ms
    assert isinstance(timing, Timing)


def test_inputs_are_reproducible_and_of_the_asked_shape():
    a, b = (make_inputs(100, 32, 4, 2, torch.float32, CPU, seed=5) for _ in range(2))
    for x, y, heads in zip(a[0], b[0], (4, 2, 2), strict=True):
        assert x.shape == (1, heads, 100, 32)
        assert torch.equal(x, y)
    assert torch.equal(a[1][0], a[len(a.sets) + 1][0])


@pytest.mark.gpu
def test_bench_on_the_gpu_predicts_what_it_did_not_see(tmp_path):
    plan = Plan(
        lengths=(2048, 4096, 8192), held_out_lengths=(6144,), head_dims=(64,), is_quick=True
    )
    table = run_bench(plan)
    path = tmp_path / "gpu.json"
    dump_timings(table, path)
    assert load_timings(path).device == torch.cuda.get_device_name()
    assert {row.backend for row in table.rows} >= {"sdpa_flash", "triton"}
    assert {setting.tile for setting in table.settings if setting.is_used} == {64, 128}
    everything = table.errors[-1]
    assert everything.op == "all"
    assert everything.median <= 0.10
    assert everything.worst <= 0.25
