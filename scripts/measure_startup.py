"""Measure how long the program takes to answer, beside what it stands on.

    python scripts/measure_startup.py              # every command's --help
    python scripts/measure_startup.py --runs 20 --only --help --version

Elapsed time and processor time of whole processes, least and median; the first start is not
counted. On a busy machine the processor time is the one to read.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time

from patternsearch.cli.app import COMMAND_MODULES


def main() -> None:
    """Print a line a start."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--only", nargs=argparse.REMAINDER, help="words after patternsearch")
    options = parser.parse_args()
    print(f"{'':<28}{'elapsed s':>18}{'processor s':>18}")
    print(f"{'':<28}" + f"{'least':>9}{'median':>9}" * 2)
    for name, command in _starts(options.only):
        runs = [_run(command) for _ in range(options.runs + 1)][1:]
        columns = [f(side) for side in zip(*runs, strict=True) for f in (min, statistics.median)]
        print(f"{name:<28}" + "".join(f"{seconds:9.3f}" for seconds in columns), flush=True)


def _starts(only: list[str] | None) -> list[tuple[str, list[str]]]:
    program = [sys.executable, "-m", "patternsearch"]
    if only:
        return [(f"patternsearch {word}", [*program, word]) for word in only]
    commands = [name.rstrip("_") for name in COMMAND_MODULES]
    return [
        ("python -c pass", [sys.executable, "-c", "pass"]),
        ("import typer", [sys.executable, "-c", "import typer"]),
        ("import typer.rich_utils", [sys.executable, "-c", "import typer.rich_utils"]),
        ("patternsearch", program),
        *((f"patternsearch {option}", [*program, option]) for option in ("--version", "--help")),
        *((f"patternsearch {name} --help", [*program, name, "--help"]) for name in commands),
    ]


def _run(command: list[str]) -> tuple[float, float]:
    """Return elapsed and processor seconds."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    elapsed, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return elapsed, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


if __name__ == "__main__":
    main()
