"""A timing table that cannot price a calibration is refused before the model runs."""

import functools

import numpy as np
import pytest

from patternsearch.calibration import run
from patternsearch.calibration.api import calibrate
from patternsearch.calibration.coverage import covering_time_model
from patternsearch.calibration.request import CalibrationRequest
from patternsearch.errors import TimingError
from patternsearch.patterns.candidates import Dense
from patternsearch.selection.options import SelectionOptions
from patternsearch.timing.table import dump_timings
from support.timings_factory import timing_rows, timing_table
from support.tiny_models import tiny_model_dir


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("coverage") / "llama", head_dim=128)


@functools.cache
def rows():
    return timing_rows(dtype="float32")


@functools.cache
def table(op):
    return timing_table(tuple(row for row in rows() if row.op != op))


def table_at(path, op=None):
    """A table of float32 at 1024..16384 tokens, without one operation."""
    dump_timings(table(op), path)
    return path


def request(model, tmp_path, **changes):
    given = {"recipe": "smoke", "grid": "smoke", "lengths": (1024, 4096), "samples": 1}
    return CalibrationRequest(
        model=str(model), output=tmp_path / "c.yaml", **{**given, **changes}
    )  # fmt: skip


def test_table_that_covers_everything_is_returned(model, tmp_path):
    found = covering_time_model(
        table_at(tmp_path / "gpu.json"), request(model, tmp_path), SelectionOptions()
    )
    nothing = np.zeros(1)
    assert found.layer_backends([Dense()], 4096, nothing, nothing) == ("sdpa_cudnn",)


REFUSED = {
    "longer than measured": ({"lengths": (1024, 32768)}, None, None, r"1024\.\.16384 tokens, not"),
    "shorter than measured": ({"lengths": (512,)}, None, None, r"1024\.\.16384 tokens, not"),
    "estimator not measured": ({}, "index_pooled_query", None, "no index_pooled_query tile 64"),
    "kind not measured": ({}, "attend_a_shape", None, "no attend_a_shape tile 64"),
    "other dtype serves": ({}, None, "bfloat16", "no bfloat16 head_dim 128 times"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_table_that_does_not_cover_is_refused_before_the_model_runs(
    model, tmp_path, monkeypatch, name
):
    changes, op, serve_dtype, message = REFUSED[name]

    def scores(*arguments, **keywords):
        raise AssertionError("the model ran")

    monkeypatch.setattr(run, "calibrate_scores", scores)
    with pytest.raises(TimingError, match=message):
        calibrate(
            request(model, tmp_path, **changes),
            timings=table_at(tmp_path / "gpu.json", op),
            serve_dtype=serve_dtype,
        )
    assert not (tmp_path / "c.scores").exists()


def test_candidates_that_may_not_be_chosen_need_no_times(model, tmp_path):
    options = SelectionOptions(kinds=("a_shape", "vertical_slash"))
    path = table_at(tmp_path / "gpu.json", "index_pooled_query")
    covering_time_model(path, request(model, tmp_path), options)


def test_other_head_dim_is_refused(tmp_path):
    narrow = tiny_model_dir(tmp_path / "narrow", head_dim=64)
    with pytest.raises(TimingError, match="no float32 head_dim 64 times"):
        covering_time_model(
            table_at(tmp_path / "gpu.json"), request(narrow, tmp_path), SelectionOptions()
        )
