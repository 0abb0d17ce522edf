"""``patternsearch frontier``."""

import json

import pytest
import typer
from typer.testing import CliRunner

from patternsearch.cli.frontier import register
from patternsearch.errors import InputError
from support.run_record import finished_scores


def run(*arguments):
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    return CliRunner().invoke(app, ["frontier", *map(str, arguments)], env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def scores(tmp_path_factory):
    return finished_scores(tmp_path_factory.mktemp("frontier") / "x.scores").root


def test_frontier_prints_both_tables(scores):
    result = run(scores, "--targets", "0.8,0.9")
    assert result.exit_code == 0, result.output
    assert "measured: false" in result.stdout
    assert "Estimators" in result.stdout
    assert "V-Slash spread" in result.stdout


def test_frontier_json_holds_every_point(scores):
    document = json.loads(run(scores, "--targets", "0.9,0.8", "--json").stdout)
    points = [(point["target_mass"], point["length"]) for point in document["points"]]
    assert points == [(0.8, 1024), (0.8, 4096), (0.9, 1024), (0.9, 4096)]
    assert all(point["speed_up"] > 0 for point in document["points"])
    assert document["measured"] is False


@pytest.mark.parametrize("targets", ["high", "0.9,1.5"])
def test_frontier_refuses_bad_targets(scores, targets):
    result = run(scores, "--targets", targets)
    assert isinstance(result.exception, InputError)
    assert "targets" in str(result.exception)
