"""``patternsearch report``: files in, one page out."""

import json

import pytest
import typer
from typer.testing import CliRunner

from patternsearch.cli.report import parse_heads, register
from patternsearch.errors import InputError
from patternsearch.schema.io import dump_config
from patternsearch.schema.scores import scores_folder_of
from support.configs import make_config
from support.report_scores import write_calibration


def run(*arguments):
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "x.yaml"
    write_calibration(path, lengths=(1024,), num_layers=2)
    return path


def test_report_writes_a_page(config, tmp_path):
    page = tmp_path / "x.html"
    result = run(config, "-o", page)
    assert result.exit_code == 0, result.output
    assert "page" in result.stdout
    assert '"sample_mass"' in page.read_text()
    assert run(config, "-o", page).exit_code == 0
    document = json.loads(run(config, "-o", page, "--json").stdout)
    assert document == {"page": str(page), "size_bytes": page.stat().st_size}


def test_report_says_that_the_scores_lie_elsewhere(config, tmp_path):
    alone = tmp_path / "alone.yaml"
    alone.write_bytes(config.read_bytes())
    page = tmp_path / "alone.html"
    assert "no scores at" in run(alone, "-o", page).stderr
    assert (
        "no scores at"
        not in run(alone, "-o", page, "--scores", scores_folder_of(config).root).stderr
    )
    assert '"sample_mass"' in page.read_text()


def test_report_against_another_config(config, tmp_path):
    other = tmp_path / "other.yaml"
    dump_config(make_config(num_layers=2), other)
    page = tmp_path / "diff.html"
    result = run(config, "-o", page, "--against", other)
    assert result.exit_code == 0, result.output
    assert "build_compare" in page.read_text()


BAD = {
    "no config": (["nothing.yaml", "-o", "p.html"], "does not exist"),
    "foreign output": (["CONFIG", "-o", "CONFIG"], "no page of ours"),
    "both pages": (["CONFIG", "-o", "p.html", "--against", "CONFIG", "--heads", "0:1"], "leave"),
    "heads without a model": (["CONFIG", "-o", "p.html", "--heads", "0:1"], "--thumbnails"),
    "no scores": (["CONFIG", "-o", "p.html", "--scores", "nowhere"], "run.json"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_report_refuses(config, tmp_path, arguments, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(*[config if word == "CONFIG" else word for word in arguments])
    assert isinstance(result.exception, InputError)
    assert message in str(result.exception)
    assert not (tmp_path / "p.html").exists()


def test_heads_are_parsed():
    assert parse_heads("3:5, 0:1,3:5") == ((3, 5), (0, 1))
    with pytest.raises(InputError, match="layer:head"):
        parse_heads("3.5")
