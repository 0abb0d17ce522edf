# SPDX-License-Identifier: Apache-2.0
"""One look for every table: no rules between columns, so that results fit 80 columns."""

from collections.abc import Collection

from rich.table import Table

__all__ = ["KIND_HEADS", "plain_table"]

KIND_HEADS = {
    "dense": "Dense",
    "a_shape": "A-shape",
    "vertical_slash": "V-Slash",
    "block_sparse": "Block",
}
"""Column heads of the kinds, in their order."""


def plain_table(
    title: str, *columns: str, left: Collection[str] = (), gap: int = 2, heads: bool = True
) -> Table:
    """Return an empty table.

    Args:
        title: above it; empty for none.
        columns: their heads; a head may have several lines.
        left: the columns of words; the others hold numbers, which end below each other.
        gap: spaces between columns.
        heads: False leaves the line of heads out.
    """
    table = Table(
        title=title or None,
        title_justify="left",
        box=None,
        pad_edge=False,
        padding=(0, gap, 0, 0),
        show_header=heads,
    )
    for column in columns:
        table.add_column(
            column, justify="left" if column in left else "right", vertical="top", overflow="fold"
        )
    return table
