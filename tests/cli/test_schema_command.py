"""``patternsearch schema`` prints what is committed."""

from pathlib import Path

from support.program import run_program

COMMITTED = Path(__file__).parents[2] / "configs" / "schema" / "config.schema.json"


def test_schema_prints_the_committed_schema(capsys):
    outcome = run_program(capsys, "schema")
    assert (outcome.code, outcome.out) == (0, COMMITTED.read_text())
