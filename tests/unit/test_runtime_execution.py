"""Execution choices of a timing table reach what runs; none of them changes the result."""

from contextlib import nullcontext

import pytest
import torch

from patternsearch.errors import BackendMissing, TimingError
from patternsearch.kernels.attend import attend, build_plan
from patternsearch.kernels.attend.configs import AttendConfig, LaunchClass
from patternsearch.patterns.candidates import AShape, BlockSparse, Dense, VerticalSlashSpread
from patternsearch.runtime import sparse
from patternsearch.runtime.attach import attach
from patternsearch.runtime.phases import PhaseTimer
from patternsearch.runtime.sparse import sparse_attention_of
from patternsearch.timing import workload
from patternsearch.timing.execution import Execution, execution_on
from patternsearch.timing.workload import DenseBackend
from patternsearch.validation.evaluation import EvaluationRequest, evaluate
from support.attend import random_layer
from support.closeness import assert_close
from support.configs import make_document
from support.runtime import config_for
from support.timings_factory import timing_rows, timing_table
from support.tiny_models import tiny_model

SPREAD = VerticalSlashSpread(vertical=40, diagonals=2, tile=128)
SHAPE = AShape(sink=16, window=64, tile=64)
MIXED = {
    "one dense": [SPREAD, SHAPE, Dense(), BlockSparse(blocks=2, tile=64)],
    "dense first and last": [Dense(), SPREAD, SPREAD, Dense()],
    "all dense": [Dense()] * 4,
    "none dense": [SPREAD] * 4,
}  # fmt: skip
SCALE = 0.25


def by_plan(patterns, q, k, v):
    """The plan runs dense heads too, as tiles; the reference for gathering them."""
    plan = build_plan(q, k, scale=SCALE, candidates=patterns, backend="torch")
    return attend(q, k, v, scale=SCALE, plan=plan, backend="torch")[0]


@pytest.mark.parametrize("n", [1, 65, 300])
@pytest.mark.parametrize("name", MIXED)
def test_dense_heads_apart_give_what_one_plan_gives(name, n):
    q, k, v = random_layer(4, 2, n, 16, seed=n)
    found = sparse_attention_of(MIXED[name], q, k, v, scale=SCALE, backend="torch")
    assert_close(found, by_plan(MIXED[name], q, k, v), what=name)


def test_dense_heads_build_no_index_and_count_as_dense():
    q, k, v = random_layer(4, 2, 200, 16)
    timer = PhaseTimer(torch.device("cpu"))
    sparse_attention_of(MIXED["all dense"], q, k, v, scale=SCALE, backend="torch", phases=timer)
    assert set(timer.milliseconds()) == {"dense attention"}
    mixed = PhaseTimer(torch.device("cpu"))
    sparse_attention_of(MIXED["one dense"], q, k, v, scale=SCALE, backend="torch", phases=mixed)
    assert set(mixed.milliseconds()) == {"index", "sparse attention", "dense attention"}


def test_tuning_of_the_table_reaches_the_launch(monkeypatch):
    q, k, v = random_layer(4, 2, 200, 16)
    tuning = {LaunchClass("float32", 16, 64, False): AttendConfig(16, 16, 4, 1)}
    seen = []

    def watch(*arguments, tuning, **keywords):
        seen.append(tuning)
        return attend(*arguments, **keywords)

    monkeypatch.setattr(sparse, "attend", watch)
    for execution in (Execution(tuning, ()), None):
        sparse_attention_of(
            [SHAPE] * 4, q, k, v, scale=SCALE, backend="torch", execution=execution
        )  # fmt: skip
    assert seen == [tuning, None]


def execution_with(backend):
    row = next(row for row in timing_rows() if row.op == "dense")
    return Execution({}, (row.model_copy(update={"backend": backend, "dtype": "float32",
                                                 "head_dim": 16}),))  # fmt: skip


@pytest.mark.parametrize(
    ("measured", "expected"),
    [("sdpa_flash", "flash"), ("sdpa_cudnn_repeated_kv", "cudnn"), ("sdpa_math", None)],
)
def test_dense_heads_run_where_they_were_measured_fastest(monkeypatch, measured, expected):
    used = []

    def run(q, k, v, *, scale, backend):
        used.append(backend)
        return inner(q, k, v, scale=scale)

    inner = sparse.attention_with_lse
    monkeypatch.setattr(sparse, "attention_with_lse", run)
    monkeypatch.setattr(sparse, "lse_backends", lambda *_: ("cudnn", "flash", "triton"))
    monkeypatch.setattr(sparse, "dense_backends", lambda _: [])
    q, k, v = random_layer(4, 2, 100, 16)
    told = pytest.warns(BackendMissing, match=measured) if expected is None else nullcontext()
    with told:
        sparse_attention_of(
            MIXED["one dense"], q, k, v, scale=SCALE, backend="torch",
            execution=execution_with(measured),
        )  # fmt: skip
    assert used == [expected]


def test_dense_backend_of_another_package_is_called_by_name(monkeypatch):
    q, k, v = random_layer(4, 2, 100, 16)
    marked = DenseBackend("flash4", lambda q, k, v, scale: torch.full_like(q, 7.0))
    monkeypatch.setattr(sparse, "dense_backends", lambda _: [marked])
    found = sparse_attention_of(
        MIXED["one dense"], q, k, v, scale=SCALE, backend="torch",
        execution=execution_with("flash4"),
    )  # fmt: skip
    assert (found[:, 2] == 7.0).all()
    assert (found[:, :2] != 7.0).any()


@pytest.mark.parametrize("name", MIXED)
def test_dense_heads_stay_in_the_plan_where_the_sparse_kernel_is_fastest(monkeypatch, name):
    def never(*_, **__):
        raise AssertionError("what was measured is one launch of the sparse kernel")

    monkeypatch.setattr(sparse, "attention_with_lse", never)
    q, k, v = random_layer(4, 2, 100, 16)
    found = sparse_attention_of(
        MIXED[name], q, k, v, scale=SCALE, backend="torch", execution=execution_with("triton")
    )
    assert_close(found, by_plan(MIXED[name], q, k, v), what=name)


def test_dense_backend_that_is_not_installed_gives_way_to_the_next(monkeypatch):
    device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Made-up GPU")
    monkeypatch.setattr(workload, "_flash4", lambda: None)
    dense = next(row for row in timing_rows() if row.op == "dense")
    rows = [
        dense.model_copy(update={"backend": name, "p20_ms": ms, "p50_ms": ms, "p80_ms": ms})
        for name, ms in (("flash4", 1.0), ("sdpa_flash_repeated_kv", 2.0), ("sdpa_cudnn", 3.0))
    ]
    table = timing_table().model_copy(update={"rows": tuple(rows)})
    shape = (dense.dtype, dense.head_dim, dense.num_tokens)
    assert execution_on(table, device).dense(*shape) == "sdpa_flash_repeated_kv"
    monkeypatch.setattr(workload, "_flash4", lambda: torch.zeros)
    assert execution_on(table, device).dense(*shape) == "flash4"


def test_table_of_another_device_is_refused():
    model = tiny_model("llama")
    with pytest.raises(TimingError, match="measured on Made-up GPU and this model is on cpu"):
        attach(model, config_for(model), timings=timing_table())


def test_table_of_another_dtype_is_refused_instead_of_ignored():
    model = tiny_model("llama")
    shape = {"dtype": "float32", "head_dim": model.config.head_dim, "backend": "sdpa_math"}
    rows = [row.model_copy(update=shape) for row in timing_rows() if row.backend == "sdpa_cudnn"]
    table = timing_table(rows, device="cpu")
    with attach(model, config_for(model), timings=table) as attachment:
        assert attachment.execution is not None
    for changes in ({"dtype": "bfloat16"}, {"head_dim": 999}):
        other = timing_table([row.model_copy(update=changes) for row in rows], device="cpu")
        with pytest.raises(TimingError, match=f"no float32 head_dim {shape['head_dim']} times"):
            attach(model, config_for(model), timings=other)


def test_evaluate_refuses_it_before_the_model_loads(tmp_path):
    from patternsearch.schema.config import PatternConfig
    from patternsearch.schema.io import dump_config
    from patternsearch.timing.table import dump_timings

    dump_config(PatternConfig.model_validate(make_document(2, 4, 2)), tmp_path / "c.yaml")
    dump_timings(timing_table(), tmp_path / "gpu.json")
    request = EvaluationRequest(
        model="/nowhere", config=tmp_path / "c.yaml", timings=tmp_path / "gpu.json"
    )
    with pytest.raises(TimingError, match="Made-up GPU"):
        evaluate(request)
