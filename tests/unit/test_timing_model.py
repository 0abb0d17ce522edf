"""The time model finds the formula behind a table, and says no outside of it."""

from dataclasses import replace

import numpy as np
import pytest

from patternsearch.errors import TimingError
from patternsearch.patterns.candidates import (
    AShape,
    BlockSparse,
    Dense,
    VerticalSlashLastQ,
    VerticalSlashSpread,
)
from patternsearch.selection.options import SelectionOptions
from patternsearch.selection.select import select_heads
from patternsearch.timing.fit import Curve, Plane, Polyline
from patternsearch.timing.model import TimeModel, held_out_errors, load_time_model
from patternsearch.timing.table import dump_timings
from support.scores_factory import counts, scores_frame
from support.timings_factory import (
    SMALL_PLAN,
    dense_ms,
    index_ms,
    kernel_ms,
    timing_rows,
    timing_table,
    with_flash4,
)

CANDIDATES = (
    Dense(),
    AShape(sink=128, window=700, tile=64),
    AShape(sink=128, window=1024, tile=128),
    VerticalSlashSpread(vertical=200, diagonals=12, tile=64),
    VerticalSlashSpread(vertical=200, diagonals=6, tile=128, spread_rows=128),
    VerticalSlashLastQ(vertical=400, slash=500, tile=64),
    BlockSparse(blocks=20, tile=64),
    BlockSparse(blocks=12, tile=128, estimator="pooled"),
)


def predict(model, candidate, n):
    tiles, columns, _ = counts(candidate, n)
    cost = model.head_cost(
        (candidate,), n, np.array([[tiles]], float), np.array([[columns]], float)
    )
    return float(cost[0, 0])


def launches(model, candidates, n=16384):
    read = np.array([counts(candidate, n)[:2] for candidate in candidates], float)
    return model.launch_cost(list(candidates), n, read[:, 0], read[:, 1])


def truth(candidate, n):
    if candidate == Dense():
        return dense_ms(n)
    tiles, columns, _ = counts(candidate, n)
    return index_ms(candidate, n) + kernel_ms(candidate, n, tiles, columns)


@pytest.fixture(scope="module")
def model():
    return TimeModel(timing_table(), dtype="bfloat16", head_dim=128)


@pytest.mark.parametrize("candidate", CANDIDATES, ids=str)
@pytest.mark.parametrize("num_tokens", [1024, 2000, 4096, 5000, 12345, 16384])
def test_prediction_is_near_the_formula(model, candidate, num_tokens):
    assert predict(model, candidate, num_tokens) == pytest.approx(
        truth(candidate, num_tokens), rel=0.12
    )


def test_held_out_errors_are_small_without_noise_and_reported_by_operation():
    errors = {error.op: error for error in held_out_errors(timing_table())}
    assert errors["all"].num_rows == sum(e.num_rows for op, e in errors.items() if op != "all")
    assert {"dense", "attend_vertical_slash", "index_spread"} < set(errors)
    assert errors["all"].median <= 0.05
    assert errors["all"].worst <= 0.25


def test_held_out_errors_grow_with_noise():
    calm, noisy = (
        held_out_errors(timing_table(timing_rows(noise=noise)))[-1] for noise in (0.0, 0.1)
    )
    assert noisy.median > calm.median + 0.02


def test_held_out_rows_do_not_enter_the_fit():
    rows = timing_rows()
    spoilt = tuple(
        row.model_copy(update={"p20_ms": 9e3, "p50_ms": 9e3, "p80_ms": 9e3})
        if row.held_out
        else row
        for row in rows
    )
    a = TimeModel(timing_table(rows), dtype="bfloat16", head_dim=128)
    b = TimeModel(timing_table(spoilt), dtype="bfloat16", head_dim=128)
    for candidate in CANDIDATES:
        assert predict(a, candidate, 3000) == predict(b, candidate, 3000)


def test_more_work_never_takes_less_time(model):
    for tile in (64, 128):
        shapes = [
            AShape(sink=128, window=w, tile=tile) for w in (200, 500, 1500, 4000, 9000, 16000)
        ]
        blocks = [BlockSparse(blocks=b, tile=tile) for b in (1, 3, 9, 30, 90)]
        for family in (shapes, blocks):
            times = [predict(model, candidate, 16384) for candidate in family]
            assert times == sorted(times)


def test_fastest_backend_is_named_and_priced(model):
    assert model.layer_backends([Dense()], 4096, np.zeros(1), np.zeros(1)) == ("sdpa_cudnn",)
    assert predict(model, Dense(), 4096) == pytest.approx(dense_ms(4096), rel=1e-3)


def test_arrays_are_priced_cell_by_cell(model):
    tiles = np.array([[[400.0, 300.0]], [[500.0, 90.0]]])
    columns = np.array([[[0.0, 1000.0]], [[0.0, 50.0]]])
    candidates = (CANDIDATES[1], CANDIDATES[3])
    cost = model.head_cost(candidates, 4096, tiles, columns)
    assert cost.shape == (2, 1, 2)
    for at in np.ndindex(2, 1, 2):
        one = model.head_cost((candidates[at[2]],), 4096, tiles[at].reshape(1),
                              columns[at].reshape(1))  # fmt: skip
        assert cost[at] == pytest.approx(one[0])


def test_launches_count_once_an_index_and_once_a_tile(model):
    assert launches(model, CANDIDATES) == 0.0  # the table was measured without them
    host = {"dense": 0.1, "attend_a_shape": 0.2, "attend_vertical_slash": 0.5,
            "attend_block_sparse": 0.4, "index_spread": 2.0, "index_last_q": 3.0,
            "index_pooled_query": 1.0, "index_pooled": 1.5}  # fmt: skip
    rows = [row.model_copy(update={"host_ms": host[row.op]}) for row in timing_rows()]
    timed = TimeModel(timing_table(tuple(rows)), dtype="bfloat16", head_dim=128)
    spread = [VerticalSlashSpread(vertical=v, diagonals=4, tile=128) for v in (64, 500)]
    other_rows = VerticalSlashSpread(vertical=64, diagonals=4, tile=128, spread_rows=128)
    shape = AShape(sink=128, window=1024, tile=128)
    blocks = BlockSparse(blocks=4, tile=64)
    assert launches(timed, [shape]) == 0.2
    assert launches(timed, [*spread, shape]) == 2.0 + 0.5
    assert launches(timed, [*spread, other_rows]) == 2.0 + 2.0 + 0.5
    assert launches(timed, [*spread, blocks, blocks, Dense()]) == 2.0 + 1.0 + 0.5 + 0.4 + 0.1


def test_launches_are_those_of_the_layers_backend():
    rows = with_flash4(timing_rows(), times=0.5, start_ms=0.006)
    host = {"triton": 0.5, "flash4": 0.75}
    rows = [row.model_copy(update={"host_ms": host.get(row.backend)}) for row in rows]
    timed = TimeModel(timing_table(tuple(rows)), dtype="bfloat16", head_dim=128)
    spread = VerticalSlashLastQ(vertical=400, slash=500, tile=128)
    small, large = (AShape(sink=128, window=w, tile=128) for w in (256, 4096))
    blocks = BlockSparse(blocks=32, tile=128)
    index = launches(timed, [spread]) - 0.5
    assert launches(timed, [small]) == 0.5
    assert launches(timed, [large]) == 0.75
    assert launches(timed, [large], 1024) == 0.5, "another backend is faster there"
    assert launches(timed, [large, large, small]) == 0.75
    assert launches(timed, [large, large, blocks]) == 0.75 + 0.5, "and the index of blocks"
    assert launches(timed, [spread, large]) == index + 0.5, "one kernel runs both"
    mixed = [spread, small, large, AShape(sink=128, window=4096, tile=64)]
    assert launches(timed, mixed) == index + 0.5 + 0.5
    assert launches(timed, mixed[::-1]) == launches(timed, mixed)


def test_layer_runs_on_what_is_faster_for_all_its_sparse_heads():
    rows = with_flash4(timing_rows(), times=0.5, start_ms=0.006)
    both = TimeModel(timing_table(rows), dtype="bfloat16", head_dim=128)
    small, large = (AShape(sink=128, window=w, tile=128) for w in (256, 8192))
    spread = VerticalSlashLastQ(vertical=400, slash=500, tile=128)

    def names(*candidates):
        read = np.array([counts(candidate, 16384)[:2] for candidate in candidates], float)
        return both.layer_backends(candidates, 16384, read[:, 0], read[:, 1])

    assert names(small, small) == ("triton", "triton")
    assert names(large, small) == ("flash4", "flash4")
    assert names(large, *[small] * 60) == ("triton",) * 61, "the sum decides"
    assert names(Dense(), large) == ("sdpa_cudnn", "flash4")
    assert names(large, spread, Dense()) == ("triton", "triton", "sdpa_cudnn")


def test_heads_are_priced_by_the_kernel_that_runs_any_layer(model):
    rows = with_flash4(timing_rows(), times=0.5)
    both = TimeModel(timing_table(rows), dtype="bfloat16", head_dim=128)
    for candidate in CANDIDATES:
        assert predict(both, candidate, 16384) == predict(model, candidate, 16384)


# --- outside the table -----------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "head_dim"), [("float16", 128), ("bfloat16", 64)])
def test_other_dtype_or_head_dim_is_refused(dtype, head_dim, tmp_path):
    path = tmp_path / "gpu.json"
    dump_timings(timing_table(), path)
    assert load_time_model(path, dtype="bfloat16", head_dim=128).device == "Made-up GPU"
    with pytest.raises(TimingError, match=f"no {dtype} head_dim {head_dim} times") as caught:
        load_time_model(path, dtype=dtype, head_dim=head_dim)
    assert f"--dtype {dtype} --head-dims {head_dim}`, or say with" in str(caught.value)


def test_dtype_of_a_file_format_is_no_dtype_to_measure():
    with pytest.raises(TimingError, match="no q4_1 head_dim 128 times") as caught:
        TimeModel(timing_table(), dtype="q4_1", head_dim=128)
    assert str(caught.value).endswith("): say with --serve-dtype what will serve")


@pytest.mark.parametrize("num_tokens", [512, 1023, 16385, 131072])
def test_length_outside_the_table_is_refused(model, num_tokens):
    with pytest.raises(TimingError, match=f"covers dense at 1024..16384 tokens, not {num_tokens}"):
        predict(model, Dense(), num_tokens)


@pytest.mark.parametrize(
    ("op", "candidate"),
    [
        ("dense", CANDIDATES[0]),
        ("attend_a_shape", CANDIDATES[1]),
        ("index_last_q", CANDIDATES[5]),
        ("index_pooled", CANDIDATES[7]),
    ],
)
def test_operation_without_rows_is_refused(op, candidate):
    rows = tuple(row for row in timing_rows() if row.op != op)
    model = TimeModel(timing_table(rows), dtype="bfloat16", head_dim=128)
    with pytest.raises(TimingError, match=f"no {op} .*times") as caught:
        predict(model, candidate, 4096)
    # Dense is always a candidate.
    assert ("--kinds" in str(caught.value)) == (op != "dense")


def test_sampled_rows_are_not_guessed_from_one_number():
    quick = replace(SMALL_PLAN, is_quick=True)
    model = TimeModel(timing_table(timing_rows(quick)), dtype="bfloat16", head_dim=128)
    measured, other = (
        VerticalSlashLastQ(vertical=100, slash=512, tile=64, last_q=last_q) for last_q in (64, 256)
    )
    assert model.index_cost([measured], 4096)[0] > 0
    for refused in (model.index_cost, lambda candidates, n: model.require(candidates, [n])):
        with pytest.raises(TimingError, match=r"times of 64 sampled rows only, and .*samples 256"):
            refused([other], 4096)


def test_selection_needs_no_times_of_candidates_it_may_not_choose():
    rows = tuple(row for row in timing_rows() if "block_sparse" not in row.op)
    rows = tuple(row for row in rows if "pooled" not in row.op)
    model = TimeModel(timing_table(rows), dtype="bfloat16", head_dim=128)
    frame = scores_frame(lengths=(4096,))
    with pytest.raises(TimingError, match=r"attend_block_sparse|index_pooled"):
        select_heads(frame, SelectionOptions(), model)
    options = SelectionOptions(target_mass=0.8, kinds=("a_shape", "vertical_slash"))
    selected = select_heads(frame, options, model)
    assert selected.record.measured
    assert selected.record.timings_device == "Made-up GPU"
    assert selected.record.timings_sha256 == timing_table(rows).sha256


# --- curves ----------------------------------------------------------------------------------


def test_polyline_goes_through_its_points_and_on():
    line = Polyline(np.array([[1.0], [2.0], [4.0], [2.0]]), np.array([1.0, 3.0, 5.0, 2.0]))
    x = np.array([[0.5], [1.0], [2.0], [3.0], [4.0], [6.0]])
    np.testing.assert_allclose(line(x), [1.0, 1.0, 2.5, 3.75, 5.0, 7.5])


def test_polyline_of_one_point_scales_beyond_it():
    line = Polyline(np.array([[2.0]]), np.array([3.0]))
    np.testing.assert_allclose(line(np.array([[1.0], [2.0], [4.0]])), [3.0, 3.0, 6.0])
    nothing_read = Polyline(np.zeros((1, 2)), np.array([3.0]))
    np.testing.assert_allclose(nothing_read(np.zeros((1, 2))), [3.0])


def test_plane_finds_rates_and_ignores_what_never_varies():
    rng = np.random.default_rng(0)
    features = np.column_stack([rng.uniform(1, 50, 12), rng.uniform(0, 900, 12), np.full(12, 7.0)])
    values = 0.3 + 0.02 * features[:, 0] + 0.001 * features[:, 1]
    plane = Plane(features, values)
    other = np.array([[10.0, 100.0, 99.0]])
    np.testing.assert_allclose(plane(other), [0.3 + 0.2 + 0.1], rtol=1e-6)


def test_curve_is_exact_at_its_lengths_and_geometric_between():
    points = [Polyline(np.zeros((1, 1)), np.array([value])) for value in (1.0, 4.0)]
    line = Curve((1024, 4096), tuple(points))
    at = np.zeros((1, 1))
    assert line(1024, at)[0] == 1.0
    assert line(4096, at)[0] == 4.0
    assert line(2048, at)[0] == pytest.approx(2.0)
