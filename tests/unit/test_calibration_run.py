"""The run loop: resume, refusals, and files that do not depend on how the run went."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from patternsearch.calibration.lock import exclusive
from patternsearch.calibration.run import calibrate_scores
from patternsearch.errors import EnvironmentLacks, InputError, ModelError, ScoresError
from patternsearch.schema.io import load_config
from patternsearch.schema.scores import (
    SAMPLED_COLUMNS,
    SAMPLES_COLUMNS,
    SCORES_COLUMNS,
    scores_folder_of,
)
from support.calibrated import InterruptAfter, run_tiny, snapshot, tiny_request
from support.tiny_models import tiny_model_dir

NUM_LAYERS = 3


def part_of(output, index):
    folder = scores_folder_of(output)
    (path,) = folder.scores.glob(f"{folder.part_prefix(index)}*")
    return path


def copy_of(output, target):
    shutil.copy(output, target)
    shutil.copytree(scores_folder_of(output).root, scores_folder_of(target).root)


def test_run_leaves_the_contract(undisturbed):
    folder = scores_folder_of(undisturbed)
    scores = pd.read_parquet(folder.scores)
    samples = pd.read_parquet(folder.samples)
    assert tuple(scores.columns) == SCORES_COLUMNS
    assert tuple(samples.columns) == SAMPLES_COLUMNS
    assert set(scores["sample_id"]) == set(samples["sample_id"])
    assert (samples["token_ids"].map(len) == samples["num_tokens"]).all()
    run = json.loads(folder.run.read_text())
    assert run["status"] == "complete"
    assert {"start", "load", "draw", "forward", "score", "write", "select"} <= run["timings"].keys()
    assert "start" in run["ranks"][0]["seconds"]


def test_config_names_the_model_and_the_samples(undisturbed):
    config = load_config(undisturbed)
    samples = pd.read_parquet(scores_folder_of(undisturbed).samples)
    assert config.calibration is not None
    assert config.selection is not None
    assert [record.sample_id for record in config.calibration.samples] == list(samples["sample_id"])
    assert config.model.weights_sha256
    assert len(config.model.attention_sha256) == NUM_LAYERS
    assert not config.selection.measured
    assert config.fingerprints is not None
    assert len(config.fingerprints.values) == NUM_LAYERS


def test_sample_of_rows_is_recorded_with_its_errors(model, tmp_path):
    output = tmp_path / "c.yaml"
    outcome = run_tiny(model, output, lengths=(3072,), samples=1, row_sample=0.125)
    scores = pd.read_parquet(scores_folder_of(output).scores)
    assert tuple(scores.columns) == (*SCORES_COLUMNS, *SAMPLED_COLUMNS)
    assert (scores["mass_physical_se"] > 0).any()
    assert outcome.config.calibration is not None
    assert outcome.config.calibration.row_sample == 0.125
    with pytest.raises(InputError, match=r"row_sample: was 0\.125, now 1\.0"):
        run_tiny(model, output, lengths=(3072,), samples=1)


def test_two_runs_write_the_same_bytes(model, undisturbed, tmp_path):
    run_tiny(model, tmp_path / "c.yaml")
    assert snapshot(tmp_path / "c.yaml") == snapshot(undisturbed)


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(layers=st.lists(st.integers(1, 4 * NUM_LAYERS), min_size=1, max_size=3))
def test_resumed_run_equals_uninterrupted(model, undisturbed, tmp_path_factory, layers):
    output = tmp_path_factory.mktemp("resumed") / "c.yaml"
    for stop in layers:
        with contextlib.suppress(KeyboardInterrupt):
            run_tiny(model, output, progress=InterruptAfter(stop))
    run_tiny(model, output)
    assert snapshot(output) == snapshot(undisturbed)


def test_finished_sample_is_not_computed_again(model, tmp_path):
    output = tmp_path / "c.yaml"
    with pytest.raises(KeyboardInterrupt):
        run_tiny(model, output, progress=InterruptAfter(2 * NUM_LAYERS + 1))
    part = part_of(output, 1)
    before = part.stat().st_mtime_ns
    outcome = run_tiny(model, output)
    assert outcome.run.num_resumed == 2
    assert part.stat().st_mtime_ns == before


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty"])
def test_damaged_part_is_computed_again(model, undisturbed, tmp_path, damage):
    output = tmp_path / "c.yaml"
    copy_of(undisturbed, output)
    part = part_of(output, 2)
    content = bytearray(part.read_bytes())
    if damage == "truncated":
        content = content[: len(content) // 2]
    elif damage == "flipped":
        content[100] ^= 0xFF
    else:
        content = bytearray()
    part.write_bytes(bytes(content))
    assert run_tiny(model, output).run.num_resumed == 3
    assert snapshot(output) == snapshot(undisturbed)


def test_half_written_files_are_swept_away(model, undisturbed, tmp_path):
    output = tmp_path / "c.yaml"
    copy_of(undisturbed, output)
    folder = scores_folder_of(output)
    (folder.scores / ".part-00001.parquet.abc.tmp").write_bytes(b"half")
    (folder.root / ".run.json.abc.tmp").write_bytes(b"half")
    run_tiny(model, output)
    assert snapshot(output) == snapshot(undisturbed)
    assert not list(folder.root.rglob("*.tmp"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"lengths": (512,)}, "lengths: was [256], now [512]"),
        ({"seed": 5}, "seed: was 0, now 5"),
        ({"oracle": True}, "oracle: was False, now True"),
        ({"samples": 1}, "samples: was None, now 1"),
    ],
)
def test_changed_argument_is_named_and_refused(model, undisturbed, tmp_path, change, named):
    output = tmp_path / "c.yaml"
    copy_of(undisturbed, output)
    before = snapshot(output)
    with pytest.raises(InputError, match="other arguments") as error:
        run_tiny(model, output, **change)
    assert named in str(error.value)
    assert "--fresh" in str(error.value)
    assert snapshot(output) == before


def test_other_weights_are_refused_on_resume(undisturbed, tmp_path):
    other = tiny_model_dir(tmp_path / "other", seed=1)
    output = tmp_path / "c.yaml"
    copy_of(undisturbed, output)
    with pytest.raises(InputError, match="weights_sha256"):
        run_tiny(other, output)


def test_fresh_discards_the_earlier_run(model, undisturbed, tmp_path):
    output = tmp_path / "c.yaml"
    copy_of(undisturbed, output)
    outcome = run_tiny(model, output, samples=1, fresh=True)
    assert outcome.run.num_resumed == 0
    num_samples = len(outcome.run.record.calibration.samples)
    assert len(list(scores_folder_of(output).scores.iterdir())) == num_samples


def test_another_target_needs_no_new_scores(model, undisturbed, tmp_path):
    from patternsearch.selection.options import SelectionOptions

    output = tmp_path / "c.yaml"
    copy_of(undisturbed, output)
    outcome = run_tiny(model, output, options=SelectionOptions(target_mass=0.2))
    assert outcome.run.num_resumed == len(outcome.run.record.calibration.samples)


@pytest.mark.parametrize("name", ["c.yaml", "c.json"])
def test_foreign_output_is_never_overwritten(model, tmp_path, name):
    output = tmp_path / name
    output.write_text('{"mine": 1}')
    with pytest.raises(InputError, match="no patternsearch config"):
        run_tiny(model, output)
    assert output.read_text() == '{"mine": 1}'


def test_foreign_scores_folder_is_refused(model, tmp_path):
    folder = scores_folder_of(tmp_path / "c.yaml").root
    folder.mkdir()
    (folder / "thesis.tex").write_text("mine")
    with pytest.raises(InputError, match=r"thesis\.tex"):
        run_tiny(model, tmp_path / "c.yaml")
    assert (folder / "thesis.tex").exists()


def test_second_run_on_the_same_output_is_told_who_holds_it(model, tmp_path):
    folder = scores_folder_of(tmp_path / "c.yaml").root
    folder.mkdir()
    with (
        exclusive(folder / ".lock"),
        pytest.raises(InputError, match=f"process {os.getpid()}"),
    ):
        run_tiny(model, tmp_path / "c.yaml")


def test_lock_of_a_dead_run_does_not_hold(model, undisturbed, tmp_path):
    output = tmp_path / "c.yaml"
    copy_of(undisturbed, output)
    (scores_folder_of(output).root / ".lock").write_text("process 1 on elsewhere\n")
    run_tiny(model, output)
    assert snapshot(output) == snapshot(undisturbed)


def test_length_beyond_positions_is_refused_unless_allowed(tmp_path):
    short = tiny_model_dir(tmp_path / "short", max_position_embeddings=200)
    with pytest.raises(InputError, match="256 is beyond the 200 positions"):
        run_tiny(short, tmp_path / "c.yaml")
    outcome = run_tiny(short, tmp_path / "d.yaml", samples=1, allow_extrapolation=True)
    assert outcome.config.calibration is not None
    assert outcome.config.calibration.extrapolated


def test_length_below_the_grid_is_refused(model, tmp_path):
    with pytest.raises(InputError, match="below the 1024 tokens"):
        run_tiny(model, tmp_path / "c.yaml", grid="default")


def test_output_must_say_its_format(model, tmp_path):
    with pytest.raises(InputError, match=r"must end in \.yaml"):
        tiny_request(model, tmp_path / "config.txt")


def test_output_folder_that_cannot_be_made(model, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be made"):
        run_tiny(model, tmp_path / "file" / "c.yaml")


def test_non_finite_weights_name_layer_and_head(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = tiny_model_dir(tmp_path / "m")
    path = next(folder.glob("*.safetensors"))
    tensors = load_file(path)
    weight = tensors["model.layers.1.self_attn.q_proj.weight"]
    weight[16 * 2 + 3] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"layer 1 .*query heads 2:"):
        run_tiny(folder, tmp_path / "c.yaml")


def test_changed_text_is_refused_on_resume(model, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "format: patternsearch/recipe\nschema_version: 1\nname: mine\nseed: 0\n"
        "heldout_fraction: 0.0\nlengths: [{tokens: 256, samples: 2}]\n"
        "sources:\n  - {kind: files, name: notes, format: text, paths: [notes.txt]}\n"
    )
    words = np.random.default_rng(0).choice(["sparse", "dense", "head", "tile", "row"], 6000)
    (tmp_path / "notes.txt").write_text(" ".join(words))
    output = tmp_path / "c.yaml"
    with pytest.raises(KeyboardInterrupt):
        run_tiny(model, output, recipe=str(recipe), progress=InterruptAfter(NUM_LAYERS + 1))
    (tmp_path / "notes.txt").write_text(" ".join(words[::-1]))
    with pytest.raises(ScoresError, match="other tokens for"):
        run_tiny(model, output, recipe=str(recipe))


def test_full_disk_keeps_what_was_finished(model, undisturbed, tmp_path, monkeypatch):
    import errno

    import patternsearch.schema.files as files

    output = tmp_path / "c.yaml"
    real = os.fsync
    calls = 0

    def failing(descriptor):
        nonlocal calls
        calls += 1
        if calls > 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(files.os, "fsync", failing)
    with pytest.raises((InputError, EnvironmentLacks), match=r"(?i)space"):
        run_tiny(model, output)
    monkeypatch.undo()
    run_tiny(model, output)
    assert snapshot(output) == snapshot(undisturbed)


def test_scores_equal_a_direct_scoring(model, undisturbed):
    """The rows on disk are what the scorer says of this model's q and k: no shift of heads."""
    from patternsearch.model.capture import run_with_capture
    from patternsearch.model.loading import load_model
    from patternsearch.schema.io import load_grid
    from patternsearch.scoring.engine import LayerScorer

    folder = scores_folder_of(undisturbed)
    sample = pd.read_parquet(folder.samples).iloc[-1]
    rows = pd.read_parquet(folder.scores)
    rows = rows[rows["sample_id"] == sample["sample_id"]]
    loaded = load_model(str(model))
    scorer = LayerScorer(load_grid("smoke")[0].expand())
    token_ids = torch.from_numpy(sample["token_ids"].astype(np.int64))[None]

    def check(inputs):
        scores = scorer.score(inputs.q, inputs.k, scale=inputs.scale)
        mine = rows[rows["layer"] == inputs.layer]["mass_physical"].to_numpy()
        np.testing.assert_allclose(mine, np.asarray(scores.mass)[..., 0].reshape(-1), atol=1e-6)

    run_with_capture(loaded, token_ids, check)


def _start(model, output):
    code = "import sys; from support.calibrated import run_tiny; run_tiny(sys.argv[1], sys.argv[2])"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.Popen(
        [sys.executable, "-c", code, str(model), str(output)],
        env=environment,
        stderr=subprocess.DEVNULL,
    )


def _kill_after_parts(model, output, num_parts, delay):
    process = _start(model, output)
    scores = scores_folder_of(Path(output)).scores
    while process.poll() is None:
        if scores.exists() and len(list(scores.glob("part-*"))) >= num_parts:
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
            process.wait()
            return True
        time.sleep(0.001)
    return False


def test_killed_run_resumes_to_the_same_bytes(model, undisturbed, tmp_path):
    output = tmp_path / "c.yaml"
    assert _kill_after_parts(model, output, 1, 0.0)
    assert not output.exists()
    run_tiny(model, output)
    assert snapshot(output) == snapshot(undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fifty_kills_at_random_moments_lose_nothing(model, undisturbed, tmp_path):
    random = np.random.default_rng(0)
    for attempt in range(50):
        output = tmp_path / f"{attempt}" / "c.yaml"
        _kill_after_parts(model, output, int(random.integers(0, 4)), float(random.uniform(0, 0.2)))
        run_tiny(model, output)
        assert snapshot(output) == snapshot(undisturbed), attempt


def test_interrupted_scores_are_refused_by_select(model, tmp_path):
    from patternsearch.selection.document import load_run_record

    output = tmp_path / "c.yaml"
    with pytest.raises(KeyboardInterrupt):
        calibrate_scores(tiny_request(model, output), progress=InterruptAfter(NUM_LAYERS + 1))
    with pytest.raises(ScoresError, match="has not finished"):
        load_run_record(scores_folder_of(output))
