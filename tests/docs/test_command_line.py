"""How the program feels: quick, readable, and it tells what to do next."""

import inspect
import json
import re
import resource
import subprocess
import sys

import pytest

from patternsearch.cli._summary import kinds_by_layer
from patternsearch.cli._tables import KIND_HEADS
from patternsearch.cli._workflow import STEPS
from patternsearch.cli.app import app
from patternsearch.patterns.candidates import KINDS
from patternsearch.schema.io import dump_config
from support.configs import make_config
from support.program import run_program

HEAVY = {"torch", "numpy", "pandas", "transformers", "datasets", "scipy", "triton", "jinja2",
         "pyarrow", "yaml", "pydantic", "rich"}  # fmt: skip


def commands(group=app, prefix=()):
    for command in group.registered_commands:
        yield (*prefix, command.name or command.callback.__name__), command.callback
    for inner in group.registered_groups:
        yield from commands(inner.typer_instance, (*prefix, inner.name))


COMMANDS = dict(commands())


def test_program_alone_shows_the_workflow(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    outcome = run_program(capsys)
    assert outcome.code == 0
    for _, lines in STEPS:
        for line, _ in lines:
            assert line in outcome.out
            assert (line.split()[0],) in COMMANDS
    assert max(map(len, outcome.out.splitlines())) <= 80


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_has_a_purpose_and_an_example(words):
    text = inspect.getdoc(COMMANDS[words])
    assert len(text.splitlines()[0]) <= 100
    assert "Example: patternsearch " + " ".join(words) in text.replace("Example:\n", "Example:")


@pytest.mark.parametrize(
    "arguments",
    [(), ("--version",), ("--help",), ("recipe", "--help"), *((*c, "--help") for c in COMMANDS)],
    ids=lambda arguments: " ".join(arguments) or "alone",
)
def test_start_up_loads_nothing_heavy(arguments):
    code = (
        "import sys, runpy\n"
        f"sys.argv = ['patternsearch', *{list(arguments)!r}]\n"
        "try: runpy.run_module('patternsearch', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "import json; print(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in json.loads(run.stderr.splitlines()[-1])}
    assert not loaded & HEAVY
    assert " ".join(arguments[:-1]) in run.stdout


def processor_time(*arguments):
    """Least processor time of five runs of Python, so that a busy machine does not count."""
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


@pytest.mark.parametrize("arguments", [("--help",), ("calibrate", "--help")], ids=" ".join)
def test_help_takes_little_more_than_its_library(arguments):
    library = processor_time("-c", "import typer")
    assert processor_time("-m", "patternsearch", *arguments) < 2.5 * library


def test_help_shows_options_in_groups_and_commands_whole(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = run_program(capsys, "calibrate", "--help").out
    places = [
        text.index(f"\n{group}:\n")
        for group in ("Arguments", "Options", "Search", "Selection", "Run")
    ]
    assert places == sorted(places)
    assert places[2] < text.index("--grid") < places[3] < text.index("--target-mass") < places[4]
    listing = run_program(capsys, "--help").out
    for words, function in COMMANDS.items():
        if len(words) == 1:
            first = inspect.getdoc(function).split("\n\n")[0]
            assert " ".join(first.split()) in " ".join(listing.split())
    assert max(map(len, (text + listing).splitlines())) <= 80


def test_kind_heads_are_the_kinds():
    assert tuple(KIND_HEADS) == KINDS


def test_layer_table_fits_80_columns():
    from rich.console import Console

    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(kinds_by_layer(make_config(num_layers=40, lengths=(131072,))))
    text = console.export_text()
    for head in KIND_HEADS.values():
        assert head in text
    assert "…" not in text


def test_no_color_is_respected(capsys, monkeypatch, tmp_path):
    dump_config(make_config(), tmp_path / "c.yaml")
    monkeypatch.setenv("FORCE_COLOR", "1")
    colour = re.compile(r"\x1b\[3[0-7]m")
    assert colour.search(run_program(capsys, "show", tmp_path / "c.yaml").out)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colour.search(run_program(capsys, "show", tmp_path / "c.yaml").out)


def test_errors_are_one_sentence_without_traceback(capsys, tmp_path):
    outcome = run_program(capsys, "show", tmp_path / "nothing.yaml")
    assert outcome.code == 2
    assert len(outcome.err.strip().splitlines()) == 1
    assert outcome.err.startswith("error: ")
