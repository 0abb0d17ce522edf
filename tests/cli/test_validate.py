"""validate as a user meets it: table, JSON, exit codes."""

import json

import pytest

from patternsearch.model.loading import load_model
from patternsearch.schema.config import PatternConfig
from patternsearch.schema.io import dump_config
from support.configs import make_config
from support.faults import copy_model, edit_config, flip_one_bit, truncate
from support.program import run_program
from support.runtime import config_for
from support.tiny_models import tiny_model_dir


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("validate")


@pytest.fixture(scope="module")
def model(folder):
    return tiny_model_dir(folder)


@pytest.fixture(scope="module")
def config(folder, model):
    """A config bound to the checkpoint on disk, with true fingerprints."""
    loaded = load_model(model)
    document = config_for(loaded.model).model_dump()
    document["model"] = loaded.identity.model_dump()
    path = folder / "c.yaml"
    dump_config(PatternConfig.model_validate(document), path)
    return path


def test_a_fitting_config_exits_0_with_the_table(capsys, config, model):
    outcome = run_program(capsys, "validate", config, model)
    assert outcome.code == 0, outcome.err
    for word in ("identity", "tensor parallel", "mapping", "RoPE: rope_theta", "ok:"):
        assert word in outcome.out


def test_json_is_one_document_with_every_check(capsys, config, model):
    outcome = run_program(capsys, "validate", config, model, "--json")
    document = json.loads(outcome.out)
    assert document["format"] == "patternsearch/validation"
    assert document["status"] == "ok"
    assert {check["status"] for check in document["checks"]} == {"ok"}
    assert document["mapping"]["verdict"] == "same weights"
    keys = {"group", "name", "status", "expected", "found", "advice"}
    assert all(set(check) == keys for check in document["checks"])


def test_a_changed_weight_exits_1_and_is_named(capsys, config, model, tmp_path):
    changed = copy_model(model, tmp_path / "m")
    flip_one_bit(changed, "model.layers.2.self_attn.o_proj.weight")
    outcome = run_program(capsys, "validate", config, changed, "--level", "identity", "--json")
    assert outcome.code == 1
    found = {c["name"]: c for c in json.loads(outcome.out)["checks"] if c["status"] == "differs"}
    assert set(found) == {"weights", "attention weights"}
    assert found["attention weights"]["found"] == "changed in layers 2"


def test_no_weights_skips_the_digests_and_says_so(capsys, config, model):
    outcome = run_program(
        capsys, "validate", config, model, "--level", "identity", "--no-weights", "--json"
    )
    assert outcome.code == 0
    assert "--no-weights" in outcome.err
    statuses = {c["name"]: c["status"] for c in json.loads(outcome.out)["checks"]}
    assert statuses["weights"] == statuses["attention weights"] == "cannot tell"


def test_impossible_tp_size_exits_1(capsys, config, model):
    outcome = run_program(
        capsys, "validate", config, model, "--level", "identity", "--tp-size", "3", "--json"
    )
    assert outcome.code == 1
    (check,) = [c for c in json.loads(outcome.out)["checks"] if c["status"] == "differs"]
    assert check["name"] == "heads over 3 ranks"


def test_consumer_checks_are_added(capsys, config, model):
    outcome = run_program(
        capsys, "validate", config, model, "--level", "identity", "--consumer", "vllm", "--json"
    )
    assert outcome.code == 1
    groups = {c["group"] for c in json.loads(outcome.out)["checks"]}
    assert groups == {"identity", "tensor parallel", "consumer"}


def test_truncated_shard_exits_2_and_names_the_file(capsys, config, model, tmp_path):
    changed = copy_model(model, tmp_path / "m")
    truncate(changed / "model.safetensors")
    outcome = run_program(capsys, "validate", config, changed)
    assert outcome.code == 2
    assert "model.safetensors" in outcome.err
    assert "truncated" in outcome.err
    assert outcome.out == ""


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (("{folder}/none.yaml", "{model}"), 2, "none.yaml"),
        (("{config}", "/nowhere/model"), 2, "/nowhere/model"),
        (("{model}/config.json", "{model}"), 2, "not a patternsearch config"),
        (("{config}", "{model}", "--level", "quality", "--lengths", "9x"), 2, "'9x'"),
        (("{config}", "{model}", "--device", "cuda:7"), 3, "cuda"),
    ],
)
def test_bad_input_is_one_line(capsys, folder, config, model, arguments, code, word):
    filled = [a.format(folder=folder, model=model, config=config) for a in arguments]
    outcome = run_program(capsys, "validate", *filled)
    assert outcome.code == code, outcome.err
    assert word in outcome.err
    assert "Traceback" not in outcome.err


def test_an_imported_config_needs_a_recipe_for_quality(capsys, folder, config, model):
    def as_import(document):
        imported = {"format": "minference", "file_sha256": "0" * 64, "score_kind": "mass"}
        document.update(calibration=None, selection=None, imported=imported)
        for entry in (entry for layer in document["heads"] for entry in layer):
            entry["lengths"] = []

    path = edit_config(config, folder / "imported.yaml", as_import)
    outcome = run_program(capsys, "validate", path, model, "--level", "quality")
    assert outcome.code == 2
    assert "--recipe" in outcome.err
    outcome = run_program(
        capsys, "validate", path, model, "--level", "quality", "--recipe", "smoke",
        "--lengths", "256", "--samples", "1", "--json",
    )  # fmt: skip
    document = json.loads(outcome.out)
    assert document["quality"]["origin"] == "held-out samples of recipe smoke"
    statuses = {c["name"]: c["status"] for c in document["checks"] if c["group"] == "quality"}
    assert statuses["captured mass against the record"] == "cannot tell"


def test_another_shape_is_told_without_running_the_model(capsys, folder, model):
    path = folder / "other.yaml"
    dump_config(make_config(), path)
    outcome = run_program(capsys, "validate", path, model, "--json")
    assert outcome.code == 1
    assert "another shape" in json.loads(outcome.out)["notes"][0]
