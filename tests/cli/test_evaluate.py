"""evaluate as a user meets it, and the numbers behind it."""

import json

import pytest

from patternsearch.selection.options import SelectionOptions
from support.calibrated import run_tiny
from support.program import run_program
from support.tiny_models import tiny_model_dir


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("evaluate")


@pytest.fixture(scope="module")
def model(folder):
    return tiny_model_dir(folder)


@pytest.fixture(scope="module")
def config(folder, model):
    path = folder / "c.yaml"
    run_tiny(model, path, lengths=(512,), samples=1, options=SelectionOptions(target_mass=0.6))
    return path


def test_time_is_split_and_adds_up(capsys, model, config):
    outcome = run_program(
        capsys, "evaluate", model, "--config", config, "--no-quality", "--repetitions", "2",
        "--json",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    document = json.loads(outcome.out)
    assert document["task"] is None
    assert [(row["run"], row["num_tokens"]) for row in document["prefill"]] == [
        ("dense", 512),
        ("sparse", 512),
    ]
    for row in document["prefill"]:
        assert row["repetitions"] == 2
        parts = [row[f"{part}_ms"] for part in ("projection", "index", "attention", "other")]
        assert all(part >= 0 for part in parts)
        assert sum(parts) == pytest.approx(row["total_ms"], rel=0.35)
    dense, sparse = document["prefill"]
    assert dense["index_ms"] == 0
    assert sparse["index_ms"] > 0
    assert document["warm_up"] == 1
    assert 0 < document["density"]["512"] < 1


def test_quality_and_time_are_shown(capsys, model, config):
    outcome = run_program(capsys, "evaluate", model, "--config", config, "--repetitions", "1")
    assert outcome.code == 0, outcome.err
    for word in (
        "Logits, dense against sparse",
        "perplexity",
        "proj. + RoPE",
        "library",
        "medians of 1",
    ):
        assert word in outcome.out


def test_a_config_of_another_model_is_refused(capsys, config, tmp_path):
    other = tiny_model_dir(tmp_path, num_attention_heads=8)
    outcome = run_program(capsys, "evaluate", other, "--config", config)
    assert outcome.code == 2
    assert "query heads: config 4, model 8" in outcome.err
