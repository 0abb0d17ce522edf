"""A benchmark that is killed, or meets what this GPU cannot run, still ends in a table."""

from collections import Counter
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from triton.runtime.errors import OutOfResources

from patternsearch.errors import EnvironmentLacks, TimingError
from patternsearch.kernels.attend.configs import (
    AttendConfig,
    LaunchClass,
    launch_configs,
    tuning_configs,
)
from patternsearch.patterns.candidates import VerticalSlashSpread
from patternsearch.timing import bench, tuning
from patternsearch.timing.bench import Session
from patternsearch.timing.cases import Plan
from patternsearch.timing.clocks import CudaClock, Timing, WallClock
from patternsearch.timing.execution import execution_on, launch_tuning
from patternsearch.timing.journal import Journal
from patternsearch.timing.table import LaunchSetting
from patternsearch.timing.tuning import _fastest
from patternsearch.timing.workload import ProjectKernels, device_limits, make_inputs
from support.timings_factory import timing_table

CPU = torch.device("cpu")
TINY = Plan(
    lengths=(256, 384),
    held_out_lengths=(320,),
    head_dims=(16,),
    dtype="float32",
    num_query_heads=4,
    num_kv_heads=2,
    is_quick=True,
)


@pytest.fixture(scope="module", autouse=True)
def small_gate():
    """Build one plan instead of checking every kernel, which other tests do."""

    def check(kernels, dense, *, head_dim, dtype, device):
        q, k, _ = make_inputs(100, head_dim, 4, 2, dtype, device)[0]
        kernels.plan([VerticalSlashSpread(vertical=40, diagonals=2, tile=64)] * 4, q, k, 0.1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("patternsearch.timing.bench.check_kernels", check)
        yield


class CountingClock:
    """Counts measurements, and stops the process at one of them."""

    def __init__(self, stop_at=None, error=KeyboardInterrupt):
        self.calls, self.stop_at, self.error = 0, stop_at, error

    def measure(self, call):
        if self.calls == self.stop_at:
            raise self.error
        self.calls += 1
        return WallClock(warm_up=0, repetitions=1).measure(call)


def session(clock, journal=None, kernels=None, **keywords):
    return Session(
        plan=TINY, device=CPU, clock=clock, kernels=kernels or ProjectKernels("torch"),
        journal=journal or Journal(), **keywords,
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole():
    clock = CountingClock()
    return session(clock).table(), clock.calls


# --- killed ----------------------------------------------------------------------------------


def test_killed_run_continues_where_it_stopped(whole, tmp_path):
    table, measurements = whole
    path, notes = tmp_path / "gpu.json.partial", []
    with pytest.raises(KeyboardInterrupt):
        session(CountingClock(stop_at=measurements // 2), Journal(path, {"gpu": 1})).table()
    with path.open("ab") as file:
        file.write(b'{"row": {"op": "den')  # the machine stopped while it wrote
    clock = CountingClock()
    again = session(clock, Journal(path, {"gpu": 1}, notes.append)).table()
    assert clock.calls == measurements - measurements // 2
    assert {row.identity() for row in again.rows} == {row.identity() for row in table.rows}
    assert "continuing" in notes[0]


def test_run_of_another_machine_is_not_continued(tmp_path):
    path, notes = tmp_path / "gpu.json.partial", []
    with pytest.raises(KeyboardInterrupt):
        session(CountingClock(stop_at=5), Journal(path, {"gpu": 1})).table()
    journal = Journal(path, {"gpu": 2}, notes.append)
    assert not journal.rows
    assert "starting afresh" in notes[0]
    assert not Journal(path, {"gpu": 2}).rows


def test_case_that_kills_the_run_twice_is_left_out(whole, tmp_path):
    table, _ = whole
    path = tmp_path / "gpu.json.partial"
    for _ in range(2):
        fault = RuntimeError("CUDA error: an illegal memory access was encountered")
        with pytest.raises(RuntimeError, match="illegal memory"):
            session(CountingClock(stop_at=0, error=fault), Journal(path)).table()
    found = session(CountingClock(), Journal(path)).table()
    (lack,) = found.skipped
    assert "died" in lack.reason
    assert lack.op == "dense"
    assert len(found.rows) == len(table.rows) - 1


def test_interrupting_twice_leaves_nothing_out(whole, tmp_path):
    table, _ = whole
    path = tmp_path / "gpu.json.partial"
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            session(CountingClock(stop_at=0), Journal(path)).table()
    found = session(CountingClock(), Journal(path)).table()
    assert not found.skipped
    assert len(found.rows) == len(table.rows)


def test_launch_shapes_that_kill_the_run_twice_are_not_compared(monkeypatch, tmp_path):
    def tune(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
        yield

    monkeypatch.setattr("patternsearch.timing.bench.tune", tune)
    path, notes = tmp_path / "gpu.json.partial", []
    for _ in range(2):
        with pytest.raises(RuntimeError, match="illegal memory"):
            session(CountingClock(), Journal(path)).table()
    assert session(CountingClock(), Journal(path), note=notes.append).table().rows
    (note,) = notes
    assert "launch shapes at head_dim 16: earlier runs died" in note


def test_gpu_that_fails_is_one_sentence_with_the_way_on(monkeypatch, tmp_path):
    def fail(_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(bench, "Machine", lambda device: Mock(header=lambda plan: {}))
    monkeypatch.setattr(Session, "table", fail)
    path = tmp_path / "gpu.json.partial"
    with pytest.raises(EnvironmentLacks) as caught:
        bench.run_bench(TINY, journal=path)
    assert str(caught.value) == (
        "the GPU failed (CUDA error: an illegal memory access was encountered); "
        f"{path} keeps what is measured: run the same command again, in a new process"
    )


def test_journal_that_cannot_be_kept_is_said(tmp_path):
    with pytest.raises(EnvironmentLacks, match="cannot read the earlier measurements"):
        Journal(tmp_path)
    with pytest.raises(EnvironmentLacks, match="cannot keep measurements"):
        Journal(tmp_path / "nowhere" / "gpu.json.partial")


def test_disk_that_fails_ends_the_run_instead_of_skipping_everything(tmp_path):
    path = tmp_path / "gpu.json.partial"

    class Failing(CountingClock):
        def measure(self, call):
            if self.calls == 3:
                path.unlink()
                path.mkdir()
            return super().measure(call)

    notes = []
    with pytest.raises(EnvironmentLacks, match="cannot keep measurements"):
        session(Failing(), Journal(path), note=notes.append).table()
    assert not notes


# --- does not fit ----------------------------------------------------------------------------


class Large(ProjectKernels):
    """Kernels of which some ask for more than the device has."""

    def plan(self, candidates, q, k, scale):
        candidate = candidates[0]
        if isinstance(candidate, VerticalSlashSpread) and candidate.spread_rows == 16:
            raise OutOfResources(300000, 232448, "shared memory")
        return super().plan(candidates, q, k, scale)

    def attend(self, q, k, v, scale, plan):
        if q.shape[2] == 384 and plan.tile_plans[0].has_columns:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nMore.")
        return super().attend(q, k, v, scale, plan)


def test_what_does_not_fit_is_skipped_and_said(whole):
    table, _ = whole
    notes = []
    found = session(CountingClock(), kernels=Large("torch"), note=notes.append).table()
    missing = {row.identity() for row in table.rows} - {row.identity() for row in found.rows}
    reasons = Counter(lack.op for lack in found.skipped)
    assert reasons["attend_vertical_slash"] == sum(
        '"attend_vertical_slash"' in row and '"num_tokens":384' in row for row in missing
    )
    assert any("shared memory" in lack.reason for lack in found.skipped)
    assert any("memory of cpu" in lack.reason for lack in found.skipped)
    assert all(note.startswith("skipped: ") for note in notes)
    assert {error.op for error in found.errors} >= {"all", "dense"}


def test_head_dim_that_does_not_fit_leaves_the_other():
    class Narrow(ProjectKernels):
        def plan(self, candidates, q, k, scale):
            if q.shape[3] == 32:
                raise OutOfResources(300000, 232448, "shared memory")
            return super().plan(candidates, q, k, scale)

    notes = []
    found = Session(
        plan=replace(TINY, head_dims=(32, 16)), device=CPU, clock=CountingClock(),
        kernels=Narrow("torch"), note=notes.append,
    ).table()  # fmt: skip
    assert {row.head_dim for row in found.rows} == {16}
    assert "head_dim 32 is left out" in notes[0]
    only = replace(TINY, head_dims=(32,))
    with pytest.raises(EnvironmentLacks, match="shared memory"):
        Session(plan=only, device=CPU, clock=CountingClock(), kernels=Narrow("torch")).table()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("No execution plans support the graph"), EnvironmentLacks),
        (OutOfResources(3, 2, "shared memory"), EnvironmentLacks),
        (torch.OutOfMemoryError("out of memory"), EnvironmentLacks),
        (RuntimeError("CUDA error: device-side assert triggered"), RuntimeError),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access"), RuntimeError),
        (TimingError("a rule"), TimingError),
        (ZeroDivisionError("a bug"), ZeroDivisionError),
    ],
)
def test_limits_of_a_device_are_told_from_faults(error, expected):
    with pytest.raises(expected) as caught, device_limits(CPU, "something"):
        raise error
    assert isinstance(caught.value, EnvironmentLacks) == (expected is EnvironmentLacks)


# --- clock -----------------------------------------------------------------------------------


class FakeGpu:
    """A GPU that works while the host does; its clock is the sum of what it was given."""

    def __init__(self, monkeypatch, work_ms):
        self.now, self.work_ms, self.waits, self.syncs = 0.0, work_ms, [], 0
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.cuda, "_sleep", self.sleep)
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: FakeEvent(self))

    def synchronize(self):
        self.syncs += 1

    def sleep(self, cycles):
        self.waits.append(cycles)
        self.now += 1000.0

    def call(self, repetition):
        self.now += self.work_ms[repetition % len(self.work_ms)]


class FakeEvent:
    def __init__(self, gpu):
        self.gpu, self.at = gpu, None

    def record(self):
        self.at = self.gpu.now

    def elapsed_time(self, other):
        return other.at - self.at


def test_cuda_clock_times_the_call_and_not_the_wait(monkeypatch):
    gpu = FakeGpu(monkeypatch, [4.0, 2.0, 3.0])
    timing = CudaClock().measure(gpu.call)
    assert 2.0 <= timing.p20_ms <= timing.p50_ms == 3.0 <= timing.p80_ms <= 4.0
    assert timing.repetitions == len(gpu.waits) >= 5
    assert timing.host_ms > 0
    assert min(gpu.waits) > 0


def test_cuda_clock_repeats_long_calls_thrice(monkeypatch):
    gpu = FakeGpu(monkeypatch, [300.0])
    timing = CudaClock().measure(gpu.call)
    assert timing.repetitions == 3
    assert timing.p50_ms == 300.0


# --- launch shapes ---------------------------------------------------------------------------

PLAIN, FAST = AttendConfig(64, 64, 4, 2), AttendConfig(32, 32, 8, 3)


def setting(config, **changes):
    values = {"block_k": config.block_k, "block_c": config.block_c,
              "num_warps": config.num_warps, "num_stages": config.num_stages}  # fmt: skip
    parts = {"op": "attend", "backend": "triton", "dtype": "float32", "head_dim": 16, "tile": 64,
             "has_columns": False, "values": values, "p50_ms": 1.0, "is_used": True}  # fmt: skip
    return LaunchSetting.model_validate({**parts, **changes})


def test_only_a_clearly_faster_launch_shape_replaces_the_untuned():
    assert _fastest({PLAIN: 1.0, FAST: 0.99}) == PLAIN
    assert _fastest({PLAIN: 1.0, FAST: 0.9}) == FAST
    assert _fastest({}) is None


def test_tuning_keeps_the_fastest_that_fits_and_is_right(monkeypatch):
    plan = replace(TINY, is_quick=False)
    q = k = v = torch.zeros(1, 4, 384, 16)
    configs = tuning_configs(q, k, v, 64, False)
    times = dict(zip(configs, (3.0, 2.0, 1.0, 4.0), strict=False))
    measured = []

    def launch(inputs, scale, layer, config, repetition):
        measured.append(config)
        if config == configs[1]:
            raise OutOfResources(300000, 232448, "shared memory")
        return torch.ones(2, 2) * (1.5 if config == configs[2] else 1.001)

    class Clock:
        def measure(self, call):
            call(0)
            found = times.get(measured[-1], 1.0)
            return Timing(found, found, found, 5)

    monkeypatch.setattr(tuning, "_launch", launch)
    monkeypatch.setattr(tuning, "make_inputs", lambda *shape: make_inputs(*shape[:-1], CPU))
    cuda = torch.device("cuda")
    known = {(16, 64, True), (16, 128, False), (16, 128, True)}
    (settings,) = tuning.tune(ProjectKernels("torch"), Clock(), plan, 16, cuda, known)
    found = {launch_tuning([replace_used(s)])[SHAPE]: s for s in settings}
    assert configs[1] not in found
    assert configs[2] not in found
    assert found[configs[0]].p50_ms == 3.0
    assert sum(setting.is_used for setting in settings) == 1
    everything = {*known, (16, 64, False)}
    assert not list(tuning.tune(ProjectKernels("torch"), Clock(), plan, 16, cuda, everything))
    quick = replace(plan, is_quick=True)
    (settings,) = tuning.tune(ProjectKernels("torch"), Clock(), quick, 16, cuda, known)
    assert [setting.is_used for setting in settings] == [True]
    assert not list(tuning.tune(ProjectKernels("torch"), Clock(), plan, 16, CPU))


SHAPE = LaunchClass("float32", 16, 64, False)


def replace_used(setting):
    return setting.model_copy(update={"is_used": True})


def test_tuned_launch_comes_first_in_its_class_only():
    tuned = launch_tuning([setting(FAST), setting(PLAIN, is_used=False)])
    assert tuned == {LaunchClass("float32", 16, 64, False): FAST}
    q = k = v = torch.zeros(1, 2, 100, 16)
    assert launch_configs(q, k, v, 64, False, tuned)[0] == FAST
    known = launch_configs(q, k, v, 64, False)
    assert FAST not in known
    assert launch_configs(q, k, v, 128, False, tuned) == launch_configs(q, k, v, 128, False)
    assert launch_configs(q, k, v, 64, True, tuned) == known
    assert launch_configs(q.half(), k.half(), v.half(), 64, False, tuned)[0] != FAST
    assert launch_configs(q, k, v, 64, False, tuned)[1:] == known


def test_tuning_that_the_tensors_cannot_follow_is_left_out():
    tma = AttendConfig(64, 64, 4, 2, use_tma=True)
    tuned = {LaunchClass("float32", 16, 64, False): tma}
    q = k = v = torch.zeros(1, 2, 100, 16)  # no descriptors on a CPU
    assert tma not in launch_configs(q, k, v, 64, False, tuned)


def test_configs_to_compare_start_with_what_runs_untuned():
    q = k = v = torch.zeros(1, 2, 100, 64, dtype=torch.float16)
    for tile in (64, 128):
        for has_columns in (False, True):
            found = tuning_configs(q, k, v, tile, has_columns)
            assert found[0] == launch_configs(q, k, v, tile, has_columns)[0]
            assert len(set(found)) == len(found) >= 3


def test_unknown_launch_value_is_refused():
    with pytest.raises(TimingError, match="measure again"):
        launch_tuning([setting(FAST, values={"colour": 3})])


def test_execution_belongs_to_one_gpu_and_these_kernels(monkeypatch):
    table = timing_table(settings=(setting(FAST),))
    with pytest.raises(TimingError, match="on cpu"):
        execution_on(table, CPU)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Made-up GPU")
    cuda = torch.device("cuda")
    found = execution_on(table, cuda)
    assert list(found.tuning.values()) == [FAST]
    assert found.dense("bfloat16", 128, 5000) == "sdpa_cudnn"
    assert found.dense("bfloat16", 64, 5000) is None
    with pytest.raises(TimingError, match="other kernels"):
        execution_on(timing_table(kernel_sha256="0" * 64), cuda)


def test_index_is_measured_with_the_heads_of_one_pattern(whole):
    table, _ = whole
    for row in table.rows:
        heads = (2, 1) if row.op.startswith("index") else (4, 2)
        assert (row.num_query_heads, row.num_kv_heads) == heads
