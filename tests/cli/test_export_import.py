"""``patternsearch export`` and ``import``: files, sidecars, fragments, refusals, a real model."""

import json

import pytest

from patternsearch.schema import io
from support.configs import MINFERENCE_PATTERNS, PATTERNS, VERTICAL_SLASH_PATTERNS, make_config
from support.program import run_program
from support.tiny_models import tiny_model_dir


@pytest.fixture
def config_path(tmp_path):
    config = make_config(2, 4, 2, patterns=VERTICAL_SLASH_PATTERNS, consumer="vllm")
    io.dump_config(config, tmp_path / "c.yaml")
    return tmp_path / "c.yaml"


@pytest.mark.parametrize("engine", ["minference", "vllm", "sglang"])
def test_export_then_import_gives_the_config_back_byte_for_byte(
    capsys, config_path, tmp_path, engine
):
    exported, back = tmp_path / "x.json", tmp_path / "back.yaml"
    outcome = run_program(capsys, "export", config_path, "--to", engine, "-o", exported)
    assert outcome.code == 0, outcome.err
    outcome = run_program(capsys, "import", exported, "--from", engine, "-o", back)
    assert outcome.code == 0, outcome.err
    assert "unedited export" in outcome.err
    assert back.read_bytes() == config_path.read_bytes()


def test_the_fragment_for_the_model_config_is_the_only_output(capsys, config_path, tmp_path):
    outcome = run_program(capsys, "export", config_path, "--to", "vllm", "-o", tmp_path)
    assert (tmp_path / "sparse_attention_config.json").exists()
    fragment = json.loads(outcome.out)
    assert fragment["dual_chunk_attention_config"]["sparse_attention_threshold"] == 32768
    outcome = run_program(capsys, "export", config_path, "--to", "vllm", "-o", tmp_path, "--json")
    assert json.loads(outcome.out)["model_config"] == fragment


def test_what_cannot_be_said_is_refused_and_nothing_is_written(capsys, tmp_path):
    io.dump_config(make_config(2, 4, 2, patterns=PATTERNS), tmp_path / "c.yaml")
    target = tmp_path / "x.json"
    outcome = run_program(capsys, "export", tmp_path / "c.yaml", "--to", "vllm", "-o", target)
    assert outcome.code == 2
    assert "layer 0 head" in outcome.err
    assert "--reselect" in outcome.err
    assert not target.exists()
    outcome = run_program(
        capsys, "export", tmp_path / "c.yaml", "--to", "vllm", "-o", target, "--reselect"
    )
    assert outcome.code == 2
    assert "does not exist" in outcome.err
    assert "Traceback" not in outcome.err


def test_scores_without_reselect_is_refused(capsys, config_path, tmp_path):
    outcome = run_program(
        capsys, "export", config_path, "--to", "vllm", "-o", tmp_path, "--scores", tmp_path
    )
    assert outcome.code == 2
    assert "--reselect" in outcome.err


def test_force_replaces_a_foreign_file(capsys, config_path, tmp_path):
    target = tmp_path / "sparse_attention_config.json"
    target.write_text('{"config_groups": {}}')
    arguments = ("export", config_path, "--to", "vllm", "-o", tmp_path)
    outcome = run_program(capsys, *arguments)
    assert outcome.code == 2
    assert "Model-Optimizer" in outcome.err
    assert run_program(capsys, *arguments, "--force").code == 0
    assert isinstance(json.loads(target.read_text()), list)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model"), "llama")


def test_a_bare_file_is_bound_to_the_model_that_it_is_for(capsys, tmp_path, model):
    described = json.loads((model / "config.json").read_text())
    layers, heads = described["num_hidden_layers"], described["num_attention_heads"]
    config = make_config(layers, heads, 1, patterns=MINFERENCE_PATTERNS, consumer="minference")
    io.dump_config(config, tmp_path / "c.yaml")
    bare = tmp_path / "bare.json"
    run_program(capsys, "export", tmp_path / "c.yaml", "--to", "minference", "-o", bare)
    (tmp_path / "bare.patternsearch.json").unlink()

    arguments = ("import", bare, "--from", "minference", "-o", tmp_path / "i.yaml")
    outcome = run_program(capsys, *arguments)
    assert outcome.code == 2
    assert "--model is needed" in outcome.err

    outcome = run_program(capsys, *arguments, "--model", model)
    assert outcome.code == 0, outcome.err
    imported = io.load_config(tmp_path / "i.yaml")
    assert imported.imported.score_kind == "mass"
    assert imported.model.weights_sha256 is not None
    assert [[h.pattern for h in layer] for layer in imported.heads] == [
        [h.pattern for h in layer] for layer in config.heads
    ]
    again = tmp_path / "again.json"
    run_program(capsys, "export", tmp_path / "i.yaml", "--to", "minference", "-o", again)
    assert again.read_bytes() == bare.read_bytes()


def test_an_edited_export_comes_back_bare_with_a_warning(capsys, tmp_path, model):
    described = json.loads((model / "config.json").read_text())
    layers, heads = described["num_hidden_layers"], described["num_attention_heads"]
    config = make_config(layers, heads, 1, patterns=VERTICAL_SLASH_PATTERNS, consumer="minference")
    io.dump_config(config, tmp_path / "c.yaml")
    path = tmp_path / "x.json"
    run_program(capsys, "export", tmp_path / "c.yaml", "--to", "minference", "-o", path)
    document = json.loads(path.read_text())
    document[0]["0"][1] = 4242
    path.write_text(json.dumps(document))
    outcome = run_program(
        capsys, "import", path, "--from", "minference", "-o", tmp_path / "i.yaml", "--model", model
    )
    assert outcome.code == 0, outcome.err
    assert "was edited since its export" in outcome.err
    imported = io.load_config(tmp_path / "i.yaml")
    assert imported.calibration is None
    assert imported.heads[0][0].pattern.vertical == 4242


def test_import_of_another_shape_is_refused(capsys, tmp_path, model):
    config = make_config(1, 2, 1, patterns=VERTICAL_SLASH_PATTERNS, consumer="minference")
    io.dump_config(config, tmp_path / "c.yaml")
    path = tmp_path / "x.json"
    run_program(capsys, "export", tmp_path / "c.yaml", "--to", "minference", "-o", path)
    (tmp_path / "x.patternsearch.json").unlink()
    outcome = run_program(
        capsys, "import", path, "--from", "minference", "-o", tmp_path / "i.yaml", "--model", model
    )
    assert outcome.code == 2
    assert "belongs to another model" in outcome.err
    assert not (tmp_path / "i.yaml").exists()
