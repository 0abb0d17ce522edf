"""The script that measures two GPUs: what it compares, and a rehearsal of it on gloo ranks."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from patternsearch.schema.io import load_config
from patternsearch.schema.scores import MASS_COLUMNS, scores_folder_of
from support.calibrated import run_tiny
from support.tiny_models import tiny_model_dir

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / "scripts" / "measure_two_gpus.py"))


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calibrated")
    run_tiny(tiny_model_dir(folder), folder / "c.yaml")
    return folder / "c.yaml"


@pytest.fixture(scope="module")
def scores(calibrated):
    return pd.read_parquet(scores_folder_of(calibrated).scores)


def test_equal_scores_in_any_order_are_equal(script, scores):
    found = script["compare_scores"](scores.sample(frac=1, random_state=0), scores)
    assert found["rows"] == len(scores)
    assert found["same_rows"]
    assert found["largest_mass_gap"] == 0.0
    assert found["equal_counts"] == 1.0


def test_one_mass_and_one_count_are_found(script, scores):
    changed = scores.copy()
    changed.loc[5, "mass_q3"] += 0.25
    changed.loc[7, "tiles"] += 1
    found = script["compare_scores"](changed, scores)
    assert found["largest_mass_gap"] == pytest.approx(0.25)
    assert found["equal_counts"] == pytest.approx(1 - 1 / len(scores))


def test_lacking_rows_are_not_compared(script, scores):
    found = script["compare_scores"](scores.iloc[1:], scores)
    assert found == {"rows": len(scores), "same_rows": False}


def test_heads_are_at_home_unless_swapped(script, scores):
    total = scores[["layer", "head"]].drop_duplicates().shape[0]
    noisy = scores.copy()
    noisy[list(MASS_COLUMNS)] += 1e-4
    assert script["heads_at_home"](noisy, scores) == (total, total)
    swapped = scores.copy()
    here = swapped.layer == 1
    swapped.loc[here, "head"] = swapped.loc[here, "head"].replace({0: 3, 3: 0})
    assert script["heads_at_home"](swapped, scores) == (total - 2, total)


def test_unmeasured_ranks_are_predicted_by_the_pairs_of_their_heads(script, calibrated):
    config = load_config(calibrated)
    pairs, unit = script["predicted_by_rank"](config, 2)
    assert unit == "pairs"
    by_hand = [
        sum(
            entry.lengths[-1].tiles * getattr(entry.pattern, "tile", 64) ** 2
            + entry.lengths[-1].columns * getattr(entry.pattern, "tile", 64)
            for layer in config.heads
            for head, entry in enumerate(layer)
            if head // 2 == rank
        )
        for rank in range(2)
    ]
    assert pairs == by_hand
    assert script["slowest_over_mean"]([1.0, 3.0]) == pytest.approx(1.5)


def test_files_that_differ_are_counted(script, calibrated, tmp_path):
    other = tmp_path / "c.yaml"
    other.write_bytes(calibrated.read_bytes() + b"\n")
    folder, copy = scores_folder_of(calibrated), scores_folder_of(other)
    copy.scores.mkdir(parents=True)
    for path in (folder.samples, folder.run, *folder.scores.iterdir()):
        (copy.root / path.relative_to(folder.root)).write_bytes(path.read_bytes())
    assert script["compare_files"](calibrated, calibrated)["differing_files"] == 0
    assert script["compare_files"](other, calibrated)["differing"] == ["config"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rehearsal_on_the_cpu_passes_but_for_speed(tmp_path):
    path = os.pathsep.join(map(str, (ROOT / "src", ROOT / "tests")))
    parts = "dp,tp,mapping"  # kill: tests/unit/test_distributed_run.py
    command = ["scripts/measure_two_gpus.py", "--device", "cpu", "--part", parts, "--out",
               tmp_path / "r.json"]  # fmt: skip
    run = subprocess.run(
        [sys.executable, *map(str, command), "--work", str(tmp_path), "--timeout", "280"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
    )
    results = json.loads((tmp_path / "r.json").read_text())
    for part in parts.split(","):
        assert "error" not in results[part], run.stdout
        failed = {name for name, ok in results[part]["checks"].items() if not ok}
        # Two processes share the cores of one: no rehearsal can be faster.
        assert failed <= {"sampling <= 0.6 of one GPU", "whole process <= 0.6 of one GPU"}, part
    assert results["dp"]["differing_files"] == 0
