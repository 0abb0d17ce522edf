"""A process that has loaded torch ends at once, and loses nothing by it."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys
from patternsearch.cli.app import main
atexit.register(print, "handlers run", file=sys.stderr)
sys.argv = ["patternsearch", *{arguments}]
main()
"""


def _run(*arguments):
    code = PROGRAM.format(arguments=arguments)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_output_is_whole_and_handlers_run():
    run = _run("env", "--json")
    assert run.returncode == 0
    assert json.loads(run.stdout)["torch"]
    assert run.stderr == "handlers run\n"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(("validate", "{nowhere}.yaml", "nowhere"), 2), (("calibrate", "x", "-o", "x.txt"), 2)],
)
def test_exit_code_and_message_survive(arguments, code):
    run = _run(*arguments)
    assert run.returncode == code
    assert run.stderr.startswith("error: ")
    assert run.stderr.endswith("handlers run\n")
