"""``patternsearch diff``: exit codes, forms, width, speed, bad input."""

import json
import os
import resource
import subprocess
import sys

import pytest

from patternsearch.patterns.candidates import AShape, VerticalSlashLastQ
from patternsearch.schema import io
from support.configs import VERTICAL_SLASH_PATTERNS, make_config
from support.program import run_program


@pytest.fixture
def pair(tmp_path):
    """Two configs: another kind in one head, another budget in one, all else the same."""
    a = make_config(2, 4, 2, patterns=VERTICAL_SLASH_PATTERNS, measured=True)
    heads = [list(layer) for layer in a.heads]
    for at, pattern in (
        ((0, 1), AShape(sink=64, window=256, tile=64)),
        ((1, 3), VerticalSlashLastQ(vertical=31, slash=131, tile=64)),
    ):
        layer, head = at
        heads[layer][head] = heads[layer][head].model_copy(update={"pattern": pattern})
    b = a.model_copy(update={"heads": tuple(map(tuple, heads))})
    paths = tmp_path / "a.yaml", tmp_path / "b.json"
    io.dump_config(a, paths[0])
    io.dump_config(b, paths[1])
    return paths


def test_exit_codes_follow_fail_on(capsys, pair):
    a, b = pair
    assert run_program(capsys, "diff", a, a).code == 0
    codes = {on: run_program(capsys, "diff", a, b, "--fail-on", on).code
             for on in ("any", "pattern", "budget", "identity", "never")}  # fmt: skip
    assert codes == {"any": 1, "pattern": 1, "budget": 1, "identity": 0, "never": 0}
    assert run_program(capsys, "diff", a, b).code == 1


def test_table_names_what_changed_within_100_columns(capsys, pair, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    outcome = run_program(capsys, "diff", *pair)
    assert max(map(len, outcome.out.splitlines())) <= 100
    assert "a_shape 64+256" in outcome.out
    assert "vertical_slash 31+131" in outcome.out
    assert "1 pattern, 1 budget" in " ".join(outcome.out.split())
    assert outcome.err == ""


def test_equal_files_say_so(capsys, pair):
    assert "no differences" in run_program(capsys, "diff", pair[0], pair[0]).out


@pytest.mark.parametrize("option", [("--json",), ("--format", "json")])
def test_json_holds_every_head(capsys, pair, option):
    document = json.loads(run_program(capsys, "diff", *pair, *option).out)
    changed = {
        (layer["layer"], head["head"]): head["what"]
        for layer in document["layers"]
        for head in layer["heads"]
    }
    assert changed == {(0, 1): "pattern", (1, 3): "budget"}


def test_markdown(capsys, pair):
    out = run_program(capsys, "diff", *pair, "--format", "markdown").out
    assert out.startswith("# Pattern diff\n")
    assert "| 0 | 1 | vertical_slash" in out


def test_rich_markup_in_names_is_shown_as_it_is(capsys, tmp_path):
    path = tmp_path / "[red]x.yaml"
    io.dump_config(make_config(), path)
    assert "[red]x.yaml" in "".join(run_program(capsys, "diff", path, path).out.split("\n"))


@pytest.mark.slow
def test_5120_heads_compare_in_two_seconds(tmp_path):
    paths = []
    for seed in (0, 1):
        paths.append(tmp_path / f"{seed}.yaml")
        io.dump_config(make_config(80, 64, 8, seed=seed), paths[-1])
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run = subprocess.run(
            [sys.executable, "-m", "patternsearch", "diff", *map(str, paths)],
            capture_output=True,
            check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert run.returncode == 1
    # Processor time, start-up included: the same whatever else the machine does.
    assert min(seconds) < 2.0
