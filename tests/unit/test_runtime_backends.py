"""A layer runs on the backends that the timing table names, or a person hears why not."""

import itertools
import json
import warnings

import numpy as np
import pytest
import torch

from patternsearch.errors import BackendMissing
from patternsearch.kernels.attend import flash4
from patternsearch.kernels.attend.reference import a_shape_mask
from patternsearch.patterns.candidates import (
    AShape,
    BlockSparse,
    Dense,
    VerticalSlashLastQ,
    VerticalSlashSpread,
)
from patternsearch.patterns.geometry import a_shape_counts, block_sparse_counts
from patternsearch.runtime import sparse
from patternsearch.runtime.attach import attach
from patternsearch.runtime.phases import PhaseTimer
from patternsearch.runtime.sparse import sparse_attention_of
from patternsearch.timing.execution import execution_on
from patternsearch.timing.model import TimeModel
from support.attend import random_layer
from support.closeness import assert_close
from support.fake_flash4 import install
from support.runtime import assert_logits_close, config_for, logits_of, random_ids
from support.scores_factory import counts
from support.timings_factory import timing_rows, timing_table, with_flash4
from support.tiny_models import tiny_model

CPU = torch.device("cpu")
SHAPE = AShape(sink=16, window=200, tile=128)
BLOCKS = BlockSparse(blocks=3, tile=128)
POOLED = BlockSparse(blocks=2, tile=128, estimator="pooled")
OURS = (
    AShape(sink=16, window=200, tile=64),
    VerticalSlashSpread(vertical=40, diagonals=2, tile=128),
    VerticalSlashLastQ(vertical=40, slash=100, tile=64),
    BlockSparse(blocks=4, tile=64),
)
"""What flash4 has no kernel for."""
MIXED = (OURS[0], SHAPE, Dense(), OURS[1], BLOCKS, OURS[2], POOLED, OURS[3])
THEIRS = (SHAPE, Dense(), BLOCKS, POOLED)


def table(dtype="float16", head_dim=64, **flash4_times):
    """Measured on the CPU; times of flash4 as for `with_flash4`, by default half of ours."""
    shape = {"dtype": dtype, "head_dim": head_dim}
    rows = [row for row in timing_rows() if row.backend != "sdpa_flash"]
    renamed = {"sdpa_cudnn": "sdpa_math"}
    rows = [
        row.model_copy(update={**shape, "backend": renamed.get(row.backend, row.backend)})
        for row in rows
    ]
    return timing_table(with_flash4(rows, **flash4_times), device="cpu")


# --- the choice ------------------------------------------------------------------------------


@pytest.mark.parametrize(("times", "name"), [(0.5, "flash4"), (2.0, "triton")])
def test_fastest_sparse_backend_is_named(monkeypatch, times, name):
    install(monkeypatch)
    execution = execution_on(table(times=times), CPU)
    for patterns in ((SHAPE,), (BLOCKS, POOLED), (SHAPE, BLOCKS, SHAPE, POOLED)):
        for num_tokens in (1, 1000, 4096, 5000, 10**6):
            assert execution.sparse(patterns, "float16", 64, num_tokens) == name
    assert execution.missing("float16", 64) == ()
    assert execution.lack("float16", 64) is None


def test_layer_with_a_head_that_flash4_cannot_run_is_ours(monkeypatch):
    install(monkeypatch)
    execution = execution_on(table(), CPU)
    for pattern in OURS:
        assert execution.sparse([pattern], "float16", 64, 4096) == "triton"
        assert execution.sparse([SHAPE, pattern, BLOCKS], "float16", 64, 4096) == "triton"
    for dtype, head_dim in (("float32", 64), ("bfloat16", 192)):
        strange = execution_on(table(dtype, head_dim), CPU)
        assert strange.sparse([SHAPE], dtype, head_dim, 4096) == "triton"
    assert execution.sparse([SHAPE], "bfloat16", 64, 4096) == "triton", "another shape's times"


def test_layer_with_a_head_that_was_not_measured_is_ours(monkeypatch):
    install(monkeypatch)
    rows = tuple(row for row in table().rows if row.op != "attend_block_sparse")
    execution = execution_on(timing_table(rows, device="cpu"), CPU)
    assert execution.sparse([SHAPE], "float16", 64, 4096) == "flash4"
    assert execution.sparse([SHAPE, BLOCKS], "float16", 64, 4096) == "triton"


def test_choice_is_what_the_time_model_says_of_the_layer(monkeypatch):
    install(monkeypatch)
    both = table(times=0.5, start_ms=0.006)
    execution, model = execution_on(both, CPU), TimeModel(both, dtype="float16", head_dim=64)
    seen = set()
    for n in (1024, 2048, 3000, 4096, 16384):
        for patterns in itertools.product(
            [AShape(sink=128, window=w, tile=128) for w in (128, 3000, 9000)],
            [BlockSparse(blocks=b, tile=128) for b in (1, 30, 90)],
        ):
            tiles = np.array([counts(pattern, n)[0] for pattern in patterns], float)
            (promised,) = set(model.layer_backends(patterns, n, tiles, np.zeros(2)))
            assert execution.sparse(patterns, "float16", 64, n) == promised
            seen.add(promised)
    assert seen == {"triton", "flash4"}


def test_nearest_measured_length_decides_outside_the_table(monkeypatch):
    install(monkeypatch)
    execution = execution_on(table(times=0.5, start_ms=0.006), CPU)
    wide = [AShape(sink=128, window=9000, tile=128)]
    assert execution.sparse(wide, "float16", 64, 1024) == "triton"
    assert execution.sparse(wide, "float16", 64, 16384) == "flash4"
    assert execution.sparse(wide, "float16", 64, 3) == "triton"
    assert execution.sparse(wide, "float16", 64, 10**6) == "flash4"


def test_backend_that_is_not_installed_is_missing_by_name():
    assert not flash4.is_available(CPU)
    execution = execution_on(table(), CPU)
    assert execution.sparse([SHAPE], "float16", 64, 4096) == "triton"
    assert execution.missing("float16", 64) == ("flash4",)
    assert execution.missing("bfloat16", 64) == ()
    said = execution.lack("float16", 64)
    for part in ("flash4", "float16", "pip install --pre 'patternsearch[fa4]'", "bench"):
        assert part in said


def test_backend_that_was_nowhere_fastest_is_not_missed():
    execution = execution_on(table(times=2.0), CPU)
    assert execution.missing("float16", 64) == ()


def test_dense_backend_can_be_missing_too():
    rows = [row for row in table(times=2.0).rows if row.op == "dense"]
    rows = [row.model_copy(update={"backend": "flash4", "p20_ms": 1e-6, "p50_ms": 1e-6})
            for row in rows] + rows  # fmt: skip
    execution = execution_on(timing_table(tuple(rows), device="cpu"), CPU)
    assert execution.missing("float16", 64) == ("flash4",)
    assert execution.dense("float16", 64, 4096) == "sdpa_math"


# --- one layer -------------------------------------------------------------------------------


def layer(n, patterns=MIXED, **keywords):
    q, k, v = random_layer(len(patterns), len(patterns) // 2, n, 64, dtype=torch.float16, seed=n)
    return sparse_attention_of(patterns, q, k, v, scale=0.125, backend="torch", **keywords)


@pytest.mark.parametrize("n", [1, 100, 128, 555, 1023])
def test_layer_on_flash4_equals_the_reference(monkeypatch, n):
    package = install(monkeypatch)
    found = layer(n, THEIRS, execution=execution_on(table(), CPU))
    assert_close(found, layer(n, THEIRS), dtype=torch.float16, what=f"{n} tokens")
    (read,) = package.calls
    only_diagonal = a_shape_mask(n, tile=128, sink=0, window=1)
    for head, pattern in enumerate(THEIRS):
        if isinstance(pattern, Dense):
            assert torch.equal(read[head], only_diagonal), "a placeholder"
    assert torch.equal(read[0], a_shape_mask(n, tile=128, sink=16, window=200))
    assert [int(read[head].sum()) for head in (0, 2, 3)] == [
        a_shape_counts(n, 128, 16, 200)[1],
        block_sparse_counts(n, 128, 3)[1],
        block_sparse_counts(n, 128, 2)[1],
    ]


@pytest.mark.parametrize(
    ("patterns", "backend"),
    {
        "all flash4": ((SHAPE, BLOCKS, POOLED, SHAPE), "flash4"),
        "flash4 and dense": ((Dense(), BLOCKS, Dense(), SHAPE), "flash4"),
        "mostly flash4": ((SHAPE, BLOCKS, OURS[1], SHAPE), "torch"),
        "all kinds": (MIXED, "torch"),
        "none": (OURS, "torch"),
    }.values(),
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_sparse_heads_of_a_layer_run_in_one_call(monkeypatch, patterns, backend):
    install(monkeypatch)
    called = []

    def watch(*arguments, backend, **keywords):
        called.append(backend)
        return inner(*arguments, backend=backend, **keywords)

    inner = sparse.attend
    expected = layer(300, patterns)
    monkeypatch.setattr(sparse, "attend", watch)
    found = layer(300, patterns, execution=execution_on(table(), CPU))
    assert called == [backend]
    assert_close(found, expected, dtype=torch.float16)


def test_flash4_heads_count_as_sparse_attention(monkeypatch):
    install(monkeypatch)
    execution = execution_on(table(), CPU)
    for patterns, names in (
        ((SHAPE, BLOCKS), {"index", "sparse attention"}),
        (THEIRS, {"index", "sparse attention", "dense attention"}),
    ):
        timer = PhaseTimer(CPU)
        layer(300, patterns, execution=execution, phases=timer)
        assert set(timer.milliseconds()) == names


# --- an attached model -----------------------------------------------------------------------

PATTERNS = (*THEIRS, *(OURS[1], SHAPE, Dense(), BLOCKS))
"""The second of three layers is the one with a Vertical-Slash head."""


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", dtype=torch.float16, head_dim=64)


@pytest.fixture(scope="module")
def config(model):
    return config_for(model, PATTERNS)


def test_attached_model_runs_heads_where_the_table_says(monkeypatch, model, config):
    package = install(monkeypatch)
    ids = random_ids(300)
    with attach(model, config) as attachment:
        expected = logits_of(model, ids)
        assert attachment.backends(300) == {"torch": 9, "auto": 3}
    assert not package.calls
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attachment = attach(model, config, timings=table())
    with attachment:
        found = logits_of(model, ids)
        assert attachment.backends(300) == {"flash4": 6, "sdpa_math": 3, "torch": 3}
        assert attachment.backends(255) == {"library": 12}
    assert len(package.calls) == 2
    assert (found - expected).norm() < 2e-3 * expected.norm()
    with attach(model, config, timings=table(), layers=[1]) as attachment:
        assert attachment.backends(300)["library"] == 8
        assert sum(attachment.backends(300).values()) == 12


def test_attach_names_a_missing_backend_and_runs_ours(model, config):
    ids = random_ids(300)
    with attach(model, config):
        expected = logits_of(model, ids)
    with pytest.warns(BackendMissing, match=r"flash4 fastest .* pip install --pre") as told:
        attachment = attach(model, config, timings=table())
    assert [warning.filename for warning in told] == [__file__]
    with attachment:
        assert attachment.backends(300) == {"torch": 9, "sdpa_math": 3}
        assert_logits_close(logits_of(model, ids), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n", [100, 1000, 4097])
def test_layer_on_flash4_on_a_gpu_equals_the_reference(n, dtype):
    """Of A-shape heads, and blocks of the widest index, which leaves no near-ties."""
    pytest.importorskip("flash_attn.cute")
    device = torch.device("cuda")
    if not flash4.is_available(device):
        pytest.skip("flash4 does not run on this GPU")
    name = str(dtype).removeprefix("torch.")
    rows = [row for row in table(name).rows if row.op != "dense"]
    here = timing_table(tuple(rows), device=torch.cuda.get_device_name(device))
    execution = execution_on(here, device)
    patterns = (SHAPE, Dense(), AShape(sink=0, window=900, tile=128), SHAPE,
                BlockSparse(blocks=10**4, tile=128), Dense(), SHAPE, Dense())  # fmt: skip
    q, k, v = random_layer(8, 2, n, 64, dtype=dtype, device="cuda", seed=n)
    found = sparse_attention_of(
        patterns, q, k, v, scale=0.125, backend="triton", execution=execution
    )
    expected = sparse_attention_of(patterns, q, k, v, scale=0.125, backend="torch")
    sparse_ones = [pattern for pattern in patterns if not isinstance(pattern, Dense)]
    assert execution.sparse(sparse_ones, name, 64, n) == "flash4"
    assert_close(found, expected, dtype=dtype, what=f"{n} tokens")


@pytest.mark.parametrize("name", ["sdpa_cudnn", "sdpa_flash_repeated_kv", "flash4"])
def test_dense_backend_that_cannot_run_is_named(name):
    q, k, v = random_layer(4, 2, 70, 16)
    with pytest.warns(BackendMissing, match=f"names {name} .* 4 over 2, on cpu: torch_cpu runs"):
        out = sparse._dense(q, k, v, 0.25, name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = sparse._dense(q, k, v, 0.25, None)
        named = sparse._dense(q, k, v, 0.25, "sdpa_math")
    assert torch.equal(out, expected)
    assert_close(named, expected)


def test_evaluate_says_once_what_is_missing(capsys, tmp_path):
    from patternsearch.selection.options import SelectionOptions
    from patternsearch.timing.table import dump_timings
    from support.calibrated import run_tiny
    from support.program import run_program
    from support.tiny_models import tiny_model_dir

    folder, path, timings = tiny_model_dir(tmp_path), tmp_path / "c.yaml", tmp_path / "gpu.json"
    run_tiny(folder, path, lengths=(512,), samples=1, options=SelectionOptions(target_mass=0.6))
    dump_timings(table("float32", 16), timings)
    with warnings.catch_warnings():
        warnings.simplefilter("error", BackendMissing)
        outcome = run_program(
            capsys, "evaluate", folder, "--config", path, "--no-quality", "--repetitions", "1",
            "--timings", timings, "--json",
        )  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert outcome.err.count("warning: the timing table measured flash4") == 1
    kernel = json.loads(outcome.out)["prefill"][1]["kernel"]
    assert "flash4" not in kernel
    assert "torch" in kernel
