# SPDX-License-Identifier: Apache-2.0
"""``patternsearch recipe check``: is this recipe right, and what would it draw?"""

from typing import Annotated

import typer

from patternsearch.cli._help import CommandGroup, PlainCommand
from patternsearch.cli._options import JsonOpt, parse_lengths
from patternsearch.cli._output import Output

__all__ = ["recipe_app", "register"]

recipe_app = typer.Typer(
    cls=CommandGroup,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Work with calibration recipes.",
)


@recipe_app.callback()
def _recipe() -> None:
    """Work with calibration recipes."""


@recipe_app.command("check", cls=PlainCommand)
def check(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A recipe's path, or a shipped recipe's name.")
    ],
    lengths: Annotated[
        str | None, typer.Option(help="Lengths in tokens, such as 4096,32k.", metavar="LIST")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="Calibration samples for every length.", min=1)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Instead of the recipe's seed.", min=0)] = None,
    as_json: JsonOpt = False,
) -> None:
    """Check a recipe and its local sources, and show which samples it would draw.

    Nothing is downloaded and no text is tokenised.

    Example: patternsearch recipe check offline --lengths 2048
    """
    from patternsearch.calibration.checking import check_recipe
    from patternsearch.cli._tables import plain_table

    out = Output(as_json=as_json)
    checked = check_recipe(file, lengths=parse_lengths(lengths), samples=samples, seed=seed)
    words = ("source", "kind", "what")
    table = plain_table("", *words, "calibration", "held-out", left=words)
    for source in checked.sources:
        table.add_row(
            source.name, source.kind, source.what, str(source.calibration), str(source.heldout)
        )
    out.show(f"recipe {checked.resolved.name}: correct", table)
    for counts in checked.resolved.lengths:
        out.show(
            f"{counts.tokens} tokens: {counts.calibration} calibration, {counts.heldout} held-out"
        )
    for skipped in checked.resolved.skipped:
        out.note(f"source {skipped.name} is left out: {skipped.reason}")
    out.show(f"sha256 {checked.resolved.sha256}")
    out.data(checked.document())


def register(app: typer.Typer) -> None:
    """Add the command group to the program."""
    app.add_typer(recipe_app, name="recipe")
