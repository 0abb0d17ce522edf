"""``patternsearch recipe check``."""

import json

import pytest
import typer
from typer.testing import CliRunner

from patternsearch.cli.recipe import register
from patternsearch.errors import RecipeError
from support.recipes import recipe_document, text_files


def run(*arguments):
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    return CliRunner().invoke(app, ["recipe", "check", *arguments])


def test_recipe_check_shows_the_plan():
    result = run("smoke")
    assert result.exit_code == 0
    assert "recipe smoke: correct" in result.stdout
    assert "256 tokens: 3 calibration, 1 held-out" in result.stdout


def test_recipe_check_json_is_one_document():
    result = run("smoke", "--json", "--lengths", "1k", "--samples", "2", "--seed", "5")
    document = json.loads(result.stdout)
    assert document["recipe"]["lengths"] == [{"tokens": 1024, "calibration": 2, "heldout": 1}]
    assert document["recipe"]["seed"] == 5
    assert len(document["sha256"]) == 64
    assert sum(source["calibration"] for source in document["sources"]) == 2


def test_recipe_check_says_what_is_left_out(tmp_path):
    absent = {
        "kind": "package", "name": "absent", "package": "no_such_package_here",
        "files": ["*"], "optional": True,
    }  # fmt: skip
    (tmp_path / "a.txt").write_text("text")
    path = tmp_path / "r.json"
    path.write_text(json.dumps(recipe_document(text_files(), absent)))
    result = run(str(path))
    assert result.exit_code == 0
    assert "absent is left out: package no_such_package_here is not installed" in result.stderr


@pytest.mark.parametrize("name", ["no-such-recipe", "missing/file.yaml"])
def test_recipe_check_refuses(name):
    result = run(name)
    assert isinstance(result.exception, RecipeError)
    assert result.exception.exit_code == 2


def test_recipe_check_looks_for_local_files(tmp_path):
    path = tmp_path / "r.json"
    path.write_text(json.dumps(recipe_document(text_files())))
    result = run(str(path))
    assert isinstance(result.exception, RecipeError)
    assert "no file matches '*.txt'" in str(result.exception)
