"""Bad input to diff, show, export and import: exit code 2, fast, one message, no traceback."""

import json
import time

import pytest

from patternsearch.schema import io
from support.configs import make_config
from support.program import run_program

VS = ["vertical_and_slash", 1000, 6096, 0.5]
CONFIG = io.dumps_config(make_config(2, 4, 2))
HEAD = '    - {"pattern"'


def _layers(value):
    return json.dumps([{"0": VS, "1": VS}, {"0": VS, "1": value}])


FILES = {
    "truncated.json": (_layers(VS)[:60], ":1: not valid JSON"),
    "truncated.yaml": (CONFIG[: len(CONFIG) // 2], "truncated.yaml"),
    "duplicate.json": ('[{"0": 1, "0": 2}]', "stands twice"),
    "duplicate.yaml": (CONFIG.replace("model:", "model: 1\nmodel:", 1), ":11: key 'model'"),
    "nan.json": (_layers(VS).replace("0.5", "NaN", 1), "not a finite number"),
    "nan.yaml": (CONFIG.replace("attention_scale: 0.125", "attention_scale: .nan"), "finite"),
    "head_missing.json": (json.dumps([{"0": VS, "1": VS}, {"1": VS}]), "layer 1 lacks head 0"),
    "head_missing.yaml": (CONFIG[: CONFIG.rindex(HEAD)], "layer 1 has 3 heads"),
    "string.json": (_layers(["vertical_and_slash", "1000", 6096, 0.5]), "layer 1 head 1"),
    "string.yaml": (CONFIG.replace('"density": 1.0', '"density": "1.0"', 1), "density: got"),
    "kind.json": (_layers(["tri_shape", 1, 1, 0.5]), "layer 1 head 1: unknown pattern"),
    "kind.yaml": (CONFIG.replace('{"kind": "dense"}', '{"kind": "tri"}', 1), "tri"),
    "garbage.json": ("\x17garbage" * 1_250_000, "not valid JSON"),
    "garbage.yaml": ("garbage " * 1_250_000, "no mapping"),
    "binary.yaml": ("\ud800" * 3, "not UTF-8"),
    "keys.yaml": ("".join(f"k{i}: 1\n" for i in range(1_000_000)), "more than 256 keys"),
    "bomb.yaml": ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n", ":1: anchor &a"),
    "alias.yaml": (CONFIG.replace("dtype: float32", "dtype: *x"), "alias *x"),
    "newer.yaml": (CONFIG.replace("schema_version: 1", "schema_version: 2"), "is newer than 1"),
    "deep.yaml": ("a: " + "[" * 99 + "]" * 99, "deeper than 64"),
    "deepest.yaml": ("a: " + "[" * 5000 + "]" * 5000, ":1: not valid YAML"),
    "deep.json": ("[" * 1_000_000, "deeper than 64"),
    "empty.yaml": ("", "no mapping"),
    "scalar.json": ("5", "no mapping"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    for name, (text, _) in FILES.items():
        (folder / name).write_bytes(text.encode("utf-8", "surrogatepass"))
    (folder / "good.yaml").write_text(CONFIG)
    return folder


def _check(capsys, words, *arguments):
    start = time.process_time()
    outcome = run_program(capsys, *arguments)
    seconds = time.process_time() - start
    assert outcome.code == 2, outcome
    assert words in outcome.err
    assert "Traceback" not in outcome.err
    assert len(outcome.err) < 2000
    assert outcome.out == ""
    assert seconds < 1.0


@pytest.mark.parametrize("name", FILES)
def test_diff_refuses(capsys, folder, name):
    _check(capsys, FILES[name][1], "diff", folder / "good.yaml", folder / name)


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".yaml")])
@pytest.mark.parametrize("command", ["show", "export"])
def test_show_and_export_refuse(capsys, folder, tmp_path, command, name):
    more = ("--to", "minference", "-o", tmp_path / "x.json") if command == "export" else ()
    _check(capsys, FILES[name][1], command, folder / name, *more)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".json")])
def test_import_refuses_before_it_looks_at_the_model(capsys, folder, tmp_path, name):
    words = {"scalar.json": "a JSON list of layers"}.get(name, FILES[name][1])
    _check(
        capsys, words, "import", folder / name, "--from", "minference",
        "--model", tmp_path / "nowhere", "-o", tmp_path / "c.yaml",
    )  # fmt: skip


def test_a_list_is_no_config_for_show(capsys, tmp_path):
    path = tmp_path / "x.json"
    path.write_text(_layers(VS))
    _check(capsys, "patternsearch import", "show", path)


def test_missing_files_and_folders(capsys, tmp_path):
    _check(capsys, "does not exist", "show", tmp_path / "no.yaml")
    _check(capsys, "is a folder", "diff", tmp_path, tmp_path)
    _check(capsys, "does not exist", "import", tmp_path / "no.json", "--from", "vllm",
           "-o", tmp_path / "c.yaml")  # fmt: skip
