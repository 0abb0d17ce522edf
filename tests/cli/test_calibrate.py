"""calibrate as a user meets it: output, JSON, and one-line messages for bad input."""

import json

import pytest
from typer.testing import CliRunner

from patternsearch.cli.app import main
from patternsearch.schema.io import load_config
from support.tiny_models import tiny_model_dir


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run(capsys):
    def call(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


SMALL = ("--recipe", "smoke", "--grid", "smoke", "--lengths", "256", "--samples", "1")


def test_calibrate_writes_config_and_says_where(run, model, tmp_path):
    output = tmp_path / "c.yaml"
    code, out, err = run("calibrate", model, "-o", output, *SMALL)
    assert code == 0, err
    assert "Heads by layer" in out
    assert "measured: false" in out
    assert "samples to score" in err
    assert load_config(output).model.num_layers == 3


def test_calibrate_json_is_one_document_on_stdout(run, model, tmp_path):
    output = tmp_path / "c.json"
    code, out, err = run("calibrate", model, "-o", output, *SMALL, "--json")
    assert code == 0, err
    document = json.loads(out)
    assert document["config"] == str(output)
    assert document["measured"] is False
    assert document["unit"] == "pairs"


def test_calibrate_fresh_replaces_other_arguments(run, model, tmp_path):
    output = tmp_path / "c.yaml"
    assert run("calibrate", model, "-o", output, *SMALL)[0] == 0
    code, _, err = run("calibrate", model, "-o", output, *SMALL, "--seed", "3")
    assert code == 2
    assert "seed: was 0, now 3" in err
    assert run("calibrate", model, "-o", output, *SMALL, "--seed", "3", "--fresh")[0] == 0


BAD = {
    "no such model": (["/nowhere/model", "-o", "c.yaml"], 2, "/nowhere/model"),
    "no weights": (["{empty}", "-o", "c.yaml"], 2, "config.json"),
    "unknown recipe": (["{model}", "-o", "c.yaml", "--recipe", "nope"], 2, "nope"),
    "unknown grid": (["{model}", "-o", "c.yaml", "--grid", "nope"], 2, "nope"),
    "bad lengths": (["{model}", "-o", "c.yaml", "--lengths", "4096,x"], 2, "'x'"),
    "bad suffix": (["{model}", "-o", "c.txt"], 2, ".yaml"),
    "bad target": (["{model}", "-o", "c.yaml", "--target-mass", "1.5"], 2, "1.5"),
    "too short": (["{model}", "-o", "c.yaml", "--lengths", "128"], 2, "1024 tokens"),
    "too long": (
        ["{model}", "-o", "c.yaml", "--recipe", "smoke", "--lengths", "5000"],
        2,
        "4096 positions",
    ),
    "no gpu": (["{model}", "-o", "c.yaml", "--device", "cuda:7"], 3, "cuda"),
    "bad timings": (
        ["{model}", "-o", "c.yaml", *SMALL[:4], "--timings", "{empty}/t"],
        2,
        "does not exist",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_without_traceback(run, model, tmp_path, monkeypatch, name):
    empty = tmp_path / "empty"
    empty.mkdir()
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    arguments, expected, named = BAD[name]
    filled = [text.format(model=model, empty=empty) for text in arguments]
    code, out, err = run("calibrate", *filled)
    assert code == expected, err
    assert named in err
    assert out == ""
    assert "Traceback" not in err
    assert len([line for line in err.splitlines() if line.startswith("error:")]) == 1


def test_missing_tokenizer_is_named(run, tmp_path):
    model = tiny_model_dir(tmp_path / "m")
    for path in model.glob("token*"):
        path.unlink()
    code, _, err = run("calibrate", model, "-o", tmp_path / "c.yaml", *SMALL)
    assert code == 2
    assert "tokenizer" in err


def test_interrupt_says_how_to_resume(run, model, tmp_path, monkeypatch):
    import patternsearch.calibration.loop as loop_module

    def stop(*arguments, **keywords):
        raise KeyboardInterrupt

    monkeypatch.setattr(loop_module, "score_sample", stop)
    code, _, err = run("calibrate", model, "-o", tmp_path / "c.yaml", *SMALL)
    assert code == 130
    assert "run the same command again" in err


def test_help_has_an_example():
    from patternsearch.cli.app import app

    result = CliRunner().invoke(app, ["calibrate", "--help"])
    assert result.exit_code == 0
    assert "Example" in result.output
