"""Runs the program in this process as a shell would: arguments in; exit code and output out."""

from dataclasses import dataclass

from patternsearch.cli.app import main


@dataclass
class Outcome:
    code: int
    out: str
    err: str


def run_program(capsys, *arguments):
    """Run ``patternsearch`` with these arguments."""
    capsys.readouterr()
    try:
        main([str(argument) for argument in arguments])
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    captured = capsys.readouterr()
    return Outcome(code, captured.out, captured.err)
