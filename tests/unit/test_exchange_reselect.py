"""Re-selection for an engine: its kinds, its estimators, its scores."""

import json

import pytest

from patternsearch.errors import InputError, ScoresError
from patternsearch.exchange.export import export_config
from patternsearch.exchange.reselect import reselect
from patternsearch.patterns.candidates import (
    AShape,
    BlockSparse,
    Dense,
    VerticalSlashLastQ,
)
from patternsearch.patterns.consumers import is_expressible
from patternsearch.schema.config import PatternConfig
from support.configs import make_document, sha
from support.scores_factory import SMALL_GRID, scores_frame, write_scores

GRID = (
    *SMALL_GRID,
    AShape(sink=128, window=1024, tile=64),
    BlockSparse(estimator="pooled", blocks=100, tile=64),
    VerticalSlashLastQ(vertical=30, slash=750, tile=64),
    VerticalSlashLastQ(vertical=500, slash=1500, tile=64),
)


def _mass(rng, length, sample, layer, head, candidate):
    """The cheapest patterns are the best, so that only restrictions keep them out."""
    return [0.97 if isinstance(candidate, VerticalSlashLastQ) else 0.99] * 5


@pytest.fixture(scope="module")
def scores(tmp_path_factory):
    frame = scores_frame(GRID, num_layers=2, num_heads=4, mass=_mass)
    return write_scores(tmp_path_factory.mktemp("reselect") / "x.scores", frame)


def _config(consumer, **changes):
    document = make_document(2, 4, 2, lengths=(4096,), consumer=consumer)
    for sample in document["calibration"]["samples"]:
        sample["sha256"] = "0" * 64  # as the factory writes them
    document["selection"] |= changes
    return PatternConfig.model_validate(document)


@pytest.mark.parametrize("consumer", ["minference", "vllm", "sglang"])
def test_every_head_becomes_expressible_and_the_export_follows(scores, consumer):
    config = _config("minference")
    chosen = reselect(config, consumer, scores)
    patterns = [head.pattern for heads in chosen.heads for head in heads]
    assert all(is_expressible(pattern, consumer) for pattern in patterns)
    assert not any(isinstance(pattern, Dense) for pattern in patterns)
    expected = {"minference": AShape, "vllm": VerticalSlashLastQ, "sglang": VerticalSlashLastQ}
    assert all(isinstance(pattern, expected[consumer]) for pattern in patterns)
    assert chosen.selection.measured is False
    assert chosen.calibration == config.calibration
    assert len(json.loads(export_config(chosen, consumer).text)) == 2


def test_dense_where_nothing_expressible_reaches_the_target(scores):
    chosen = reselect(_config("minference", target_mass=0.98), "vllm", scores)
    assert {head.pattern for heads in chosen.heads for head in heads} == {Dense()}


def test_scores_of_our_own_sets_are_no_evidence_for_an_engine(scores):
    with pytest.raises(ScoresError, match="calibrate with --consumer vllm"):
        reselect(_config("patternsearch"), "vllm", scores)


def test_scores_of_another_run_are_refused(scores):
    config = _config("minference")
    samples = tuple(
        sample.model_copy(update={"sha256": sha("other")}) for sample in config.calibration.samples
    )
    calibration = config.calibration.model_copy(update={"samples": samples})
    with pytest.raises(ScoresError, match="belong to another run"):
        reselect(config.model_copy(update={"calibration": calibration}), "vllm", scores)


def test_an_imported_config_and_a_time_budget_need_more(scores):
    imported = _config("minference").model_copy(update={"calibration": None, "selection": None})
    with pytest.raises(InputError, match="no scores to select from"):
        reselect(imported, "vllm", scores)
    with pytest.raises(InputError, match="needs --timings"):
        reselect(_config("minference", objective="mass"), "vllm", scores)


def test_a_budget_recorded_as_a_fraction_needs_no_times(scores):
    config = _config("minference", objective="mass", target_mass=None, budget_fraction=0.6)
    chosen = reselect(config, "minference", scores)
    assert chosen.selection.objective == "mass"
    assert chosen.selection.budget_fraction == 0.6
    assert chosen.selection.budget_ms is None


@pytest.mark.parametrize("tolerance", [None, 0.0, 0.5])
def test_the_recorded_tie_tolerance_is_kept(scores, tolerance):
    config = _config("minference", tie_tolerance=tolerance)
    kept = reselect(config, "minference", scores).selection.tie_tolerance
    assert kept == (0.02 if tolerance is None else tolerance)


def test_missing_scores_are_named(scores, tmp_path):
    with pytest.raises(ScoresError, match="does not exist"):
        reselect(_config("minference"), "vllm", type(scores)(tmp_path))
