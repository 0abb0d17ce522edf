"""``patternsearch select``: scores in, config out, the model never touched."""

import json

import pytest
import typer
from typer.testing import CliRunner

from patternsearch.cli.select import register
from patternsearch.errors import InputError, ScoresError, TimingError
from patternsearch.patterns.candidates import AShape, BlockSparse
from patternsearch.schema.io import load_config
from patternsearch.timing.table import dump_timings
from support.run_record import finished_scores
from support.scores_factory import SMALL_GRID
from support.timings_factory import timing_rows, timing_table, with_flash4


def run(*arguments):
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    return CliRunner().invoke(app, ["select", *map(str, arguments)])


@pytest.fixture(scope="module")
def scores(tmp_path_factory):
    return finished_scores(tmp_path_factory.mktemp("select") / "x.scores").root


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("timings") / "gpu.json"
    dump_timings(timing_table(), path)
    return path


def test_select_writes_a_config_that_loads(scores, tmp_path):
    output = tmp_path / "x.yaml"
    result = run(scores, "-o", output, "--target-mass", "0.85")
    assert result.exit_code == 0, result.output
    assert "measured: false" in result.stdout
    config = load_config(output)
    assert config.selection.target_mass == 0.85
    assert not config.selection.measured
    assert all(entry.lengths for heads in config.heads for entry in heads)
    again = tmp_path / "again.yaml"
    run(scores, "-o", again, "--target-mass", "0.85")
    assert again.read_bytes() == output.read_bytes()


def test_select_by_measured_times(scores, table, tmp_path):
    output = tmp_path / "x.yaml"
    result = run(scores, "-o", output, "--target-mass", "0.8", "--timings", table, "--serve-dtype",
                 "bfloat16")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "predicted for Made-up GPU" in result.stdout
    config = load_config(output)
    assert config.selection.timings_device == "Made-up GPU"
    assert f"dense     runs below {config.selection.min_length} tokens" in result.stdout
    assert all(a.predicted_ms for heads in config.heads for e in heads for a in e.lengths)


def test_select_names_the_backends_that_its_times_rest_on(tmp_path):
    def select(rows):
        dump_timings(timing_table(rows), path)
        result = run(*arguments, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)["backends"], load_config(output)

    wide = (AShape(sink=64, window=512, tile=128), BlockSparse(blocks=4, tile=128))
    scores = finished_scores(tmp_path / "x.scores", candidates=(*SMALL_GRID, *wide)).root
    path, output = tmp_path / "gpu.json", tmp_path / "x.yaml"
    arguments = (scores, "-o", output, "--target-mass", "0.7", "--serve-dtype", "bfloat16",
                 "--timings", path)  # fmt: skip
    slow = {"p50_ms": 9e3, "p80_ms": 9e3}
    rows = [row.model_copy(update=slow if row.op == "dense" else {}) for row in timing_rows()]
    found, config = select(tuple(rows))
    patterns = [entry.pattern for layer in config.heads for entry in layer]
    num_dense = sum(pattern.kind == "dense" for pattern in patterns)
    assert found.get("sdpa_cudnn", 0) == num_dense
    assert found["triton"] == len(patterns) - num_dense > 0
    said = ", ".join(f"{name} {count}" for name, count in found.items())
    assert f"backends  {said}\n" in run(*arguments).stdout
    found, config = select(with_flash4(rows, times=0.01))
    patterns = [entry.pattern for layer in config.heads for entry in layer]
    assert sum(found.values()) == len(patterns)
    assert found["flash4"] == sum(pattern in wide for pattern in patterns) > 0
    assert "flash4" not in output.read_text()


def test_counted_work_names_no_backend(scores, tmp_path):
    result = run(scores, "-o", tmp_path / "x.yaml", "--target-mass", "0.8")
    assert "backends " not in result.stdout
    result = run(scores, "-o", tmp_path / "x.yaml", "--target-mass", "0.8", "--json")
    assert json.loads(result.stdout)["backends"] == {}


def test_select_json_tells_all_that_is_printed(scores, tmp_path):
    result = run(scores, "-o", tmp_path / "x.json", "--objective", "mass",
                 "--budget-fraction", "0.4", "--tp-size", "2", "--json")  # fmt: skip
    document = json.loads(result.stdout)
    assert document["measured"] is False
    assert document["unit"] == "pairs"
    assert document["ranks_after"]["slowest"] <= 0.4 * document["dense_cost"] / 2 * 1.0001
    assert len(document["ranks_before"]["by_rank"]) == 2
    assert document["shadow_price"] > 0
    assert document["upgrades"]
    assert sum(document["heads_by_kind"].values()) == 8


def test_select_obeys_restrictions(scores, tmp_path):
    output = tmp_path / "x.yaml"
    run(scores, "-o", output, "--target-mass", "0.8", "--kinds", "a_shape", "--dense-layers", "0-0")
    config = load_config(output)
    assert {e.pattern.kind for e in config.heads[0]} == {"dense"}
    assert {e.pattern.kind for e in config.heads[1]} <= {"dense", "a_shape"}


def test_target_of_the_objective_mass_is_a_floor_and_none_by_default(scores, tmp_path):
    output = tmp_path / "x.yaml"
    mass = ("--objective", "mass", "--budget-fraction", "0.6")
    assert run(scores, "-o", output, *mass).exit_code == 0
    assert load_config(output).selection.target_mass is None
    result = run(scores, "-o", output, *mass, "--target-mass", "0.7", "--statistic", "mean")
    assert result.exit_code == 0, result.output
    config = load_config(output)
    assert config.selection.target_mass == 0.7
    assert all(a.mass_mean >= 0.7 for heads in config.heads for e in heads for a in e.lengths)
    assert run(scores, "-o", output).exit_code == 0
    assert load_config(output).selection.target_mass == 0.95


BAD = {
    "unknown kind": (["--kinds", "stripes"], InputError, "stripes"),
    "layers": (["--dense-layers", "first"], InputError, "write layers as"),
    "layers of no digits": (["--dense-layers", "²"], InputError, "write layers as"),
    "huge layers": (["--dense-layers", "0-99999999999"], InputError, "write layers as"),
    "layers backwards": (["--dense-layers", "1-0"], InputError, "write 0-1"),
    "foreign layers": (["--dense-layers", "0-99"], InputError, "2, 3, 4 and 95 more"),
    "floor above the budget": (
        ["--objective", "mass", "--budget-fraction", "0.05", "--target-mass", "0.999"],
        InputError,
        " pairs: raise the budget, lower the target mass",
    ),
    "consumer": (["--consumer", "vllm"], ScoresError, "calibrate with --consumer vllm"),
    "no budget": (["--objective", "mass"], InputError, "exactly one budget"),
    "ranks": (["--tp-size", "3"], InputError, "do not divide"),
    "no table": (["--timings", "nothing.json"], TimingError, "does not exist"),
}


@pytest.mark.parametrize(("arguments", "error", "message"), BAD.values(), ids=BAD)
def test_select_refuses(scores, tmp_path, arguments, error, message):
    output = tmp_path / "x.yaml"
    result = run(scores, "-o", output, *arguments)
    assert isinstance(result.exception, error)
    assert message in str(result.exception)
    assert not output.exists()


def test_select_refuses_times_of_other_kernels(scores, tmp_path):
    table = tmp_path / "old.json"
    dump_timings(timing_table(kernel_sha256="0" * 64), table)
    output = tmp_path / "x.yaml"
    result = run(scores, "-o", output, "--timings", table, "--serve-dtype", "bfloat16")
    assert isinstance(result.exception, TimingError)
    assert "kernels 000000000000…" in str(result.exception)
    assert "measure again" in str(result.exception)
    assert not output.exists()


def test_select_refuses_times_of_another_dtype(scores, table, tmp_path):
    result = run(scores, "-o", tmp_path / "x.yaml", "--timings", table)
    assert isinstance(result.exception, TimingError)
    assert "no float32 head_dim 128 times" in str(result.exception)


def test_select_refuses_unfinished_runs_and_foreign_folders(scores, tmp_path):
    import shutil

    copy = tmp_path / "y.scores"
    shutil.copytree(scores, copy)
    run_file = copy / "run.json"
    document = json.loads(run_file.read_text())
    for change, message in (
        ({"fingerprints": None}, "fingerprints"),
        ({"format": "other"}, "not a patternsearch run file"),
    ):
        run_file.write_text(json.dumps(document | change))
        result = run(copy, "-o", tmp_path / "y.yaml")
        assert isinstance(result.exception, ScoresError)
        assert message in str(result.exception)
    del document["calibration"]
    run_file.write_text(json.dumps(document))
    result = run(copy, "-o", tmp_path / "y.yaml")
    assert "has not finished" in str(result.exception)
    assert "cannot be read" in str(run(tmp_path, "-o", tmp_path / "y.yaml").exception)


def test_select_keeps_foreign_files(scores, tmp_path):
    output = tmp_path / "notes.yaml"
    output.write_text("mine: true\n")
    result = run(scores, "-o", output)
    assert isinstance(result.exception, InputError)
    assert output.read_text() == "mine: true\n"
