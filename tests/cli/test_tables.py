"""Tables at 80 columns: whole names and numbers, in the columns that people look for."""

import io
import re

import pytest
from rich.console import Console

from patternsearch.cli._validate_view import worst_heads_table
from patternsearch.exchange.words import short_pattern
from patternsearch.patterns.candidates import BlockSparse, VerticalSlashSpread
from patternsearch.schema.io import dump_config
from patternsearch.validation.quality_report import HeadQuality, QualityReport, Remedy
from support.configs import PATTERNS, make_config
from support.program import run_program
from support.run_record import finished_scores

LONG = short_pattern(VerticalSlashSpread(vertical=2048, diagonals=64, tile=128))
MENDED = short_pattern(BlockSparse(blocks=64, estimator="pooled", tile=64))


@pytest.fixture(autouse=True)
def _terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def assert_fits(text):
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


def quality_report():
    head = HeadQuality(
        layer=79, head=63, pattern=LONG, length=131072, recorded_mass=0.97, mass=0.9123,
        worst_region=0.8765, oracle_mass=0.9246, density=0.1, relative_error=0.321,
        cosine=0.9912, error_over_bound=0.2,
    )  # fmt: skip
    remedy = Remedy(
        layer=79, head=63, length=131072, pattern=LONG, worst_region=0.8765, mended=MENDED,
        mended_worst_region=0.97,
    )  # fmt: skip
    return QualityReport(
        origin="recorded heldout samples", samples=("s",), backend="torch", dtype="float32",
        target_mass=0.95, heads=(head,), layers=(), remedies=(remedy,), final_error={}, swapped=(),
    )  # fmt: skip


def test_worst_heads_keep_names_and_numbers_whole():
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(worst_heads_table(quality_report()))
    text = console.export_text()
    assert_fits(text)
    words = ("79", "63", "131072", LONG, "0.9123", "0.8765", "0.0123", "0.321", "0.9912")
    assert re.search(" +".join(map(re.escape, words)), text)
    assert f"→ {MENDED}" in text


def test_show_layer_has_a_line_a_length(capsys, tmp_path):
    lengths = (8192, 32768, 131072)
    config = make_config(2, 8, 2, patterns=PATTERNS, measured=True, lengths=lengths)
    dump_config(config, tmp_path / "c.yaml")
    out = run_program(capsys, "show", tmp_path / "c.yaml", "--layer", 1).out
    assert_fits(out)
    for entry in config.heads[1]:
        assert short_pattern(entry.pattern) in out
        for at in entry.lengths:
            assert re.search(rf"{at.length} +{at.mass_worst_region:.4f} +{at.density:.3f}", out)


def test_frontier_fits(capsys, tmp_path):
    scores = finished_scores(tmp_path / "x.scores").root
    out = run_program(capsys, "frontier", scores, "--targets", "0.8,0.9").out
    assert_fits(out)
    for head in ("work saved", "V-Slash", "products", "cost"):
        assert head in out


def test_diff_fits(capsys, tmp_path):
    for name, patterns in (("a", PATTERNS), ("b", PATTERNS[::-1])):
        config = make_config(4, 8, 2, patterns=patterns, measured=True, lengths=(8192, 131072))
        dump_config(config, tmp_path / f"{name}.yaml")
    out = run_program(capsys, "diff", tmp_path / "a.yaml", tmp_path / "b.yaml").out
    assert_fits(out)
    assert short_pattern(PATTERNS[0]) in out
