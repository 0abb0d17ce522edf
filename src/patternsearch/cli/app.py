# SPDX-License-Identifier: Apache-2.0
"""Assembly of the command line: one module per command, errors to exit codes.

Importing this module loads neither torch nor datasets; a command imports its library function
when it runs. A run imports only the module of the command that it names; ``app`` has them all.
Typer converts options with pydantic, which takes long to import: the program alone and every
``--help`` end before there is an option to convert.
"""

import atexit
import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import typer

from patternsearch._version import __version__
from patternsearch.cli._help import CommandGroup, PlainCommand
from patternsearch.cli._output import Output, stderr_console
from patternsearch.errors import PatternsearchError

__all__ = ["COMMAND_MODULES", "app", "main"]

COMMAND_MODULES = (
    "calibrate",
    "select",
    "frontier",
    "validate",
    "evaluate",
    "bench",
    "show",
    "report",
    "diff",
    "export",
    "import_",
    "recipe",
    "env",
    "schema",
)
"""Modules of this package in the order of the help; each has ``register(app)``."""


app: typer.Typer
"""The whole program; assembled when first asked for."""


def _version(value: bool) -> None:
    if value:
        typer.echo(f"patternsearch {__version__}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Hold the options of the program itself."""


class _Program(CommandGroup):
    """The group of all commands; alone, it shows the order in which they are used."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            from patternsearch.cli._workflow import workflow

            Output().text(workflow())
            ctx.exit()
        return super().parse_args(ctx, args)


def _assemble(modules: Sequence[str], *, add_completion: bool = True) -> typer.Typer:
    """Return the program with the commands of these modules."""
    program = typer.Typer(
        name="patternsearch",
        cls=_Program,
        add_completion=add_completion,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
        help=(
            "Decide, prove and keep honest the sparse-attention pattern of every head.\n\n"
            "Example: patternsearch calibrate ./Llama-3.1-8B -o llama.yaml"
        ),
    )
    program.callback()(_root)
    for name in modules:
        import_module(f"patternsearch.cli.{name}").register(program)
    for command in program.registered_commands:
        command.cls = PlainCommand
    return program


def __getattr__(name: str) -> typer.Typer:
    if name == "app":
        return _assemble(COMMAND_MODULES)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _program_for(arguments: Sequence[str]) -> typer.Typer:
    """Return the program of the command that the arguments begin with, else of all commands."""
    named = [name for name in COMMAND_MODULES if arguments and arguments[0] == name.rstrip("_")]
    # Options of the program itself stand before the command, so here none of them can follow.
    return _assemble(named, add_completion=False) if named else _assemble(COMMAND_MODULES)


_OBJECTS_PER_COLLECTION = 50_000
"""Of the garbage collector's youngest generation. Python's 700 make it look through everything
that torch and transformers import again and again: a seventh of the time of importing them."""


def main(argv: list[str] | None = None) -> None:
    """Run the program; never shows a traceback for an error the user can act on.

    Args:
        argv: arguments; None takes the process's, and ends the process with the program.
    """
    if argv is not None:
        _run(argv)
        return
    gc.set_threshold(_OBJECTS_PER_COLLECTION)
    try:
        _run(None)
    except SystemExit as end:
        if isinstance(end.code, int | None):
            _end_at_once(end.code or 0)
        raise


def _run(argv: list[str] | None) -> None:
    try:
        arguments = sys.argv[1:] if argv is None else argv
        _program_for(arguments)(args=argv)
    except PatternsearchError as error:
        stderr_console().print(f"error: {error}", markup=False, soft_wrap=True, style="red")
        sys.exit(error.exit_code)


def _end_at_once(code: int) -> None:
    """End the process without taking its objects apart, which takes seconds once torch is loaded.

    Everything is on disk by now. If the output cannot be written, return: the interpreter's own
    end says so.
    """
    if "torch" not in sys.modules:
        return
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        return
    os._exit(code)
