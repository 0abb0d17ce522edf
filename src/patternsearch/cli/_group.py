# SPDX-License-Identifier: Apache-2.0
"""The kind of group that the program and its command groups are."""

from typing import Any

from typer.core import TyperGroup, TyperOption

__all__ = ["CommandGroup"]


class CommandGroup(TyperGroup):
    """A group whose ``--help`` is False when not given.

    Typer's is None then, which it converts with pydantic: as long an import as all the rest of a
    command's ``--help``.
    """

    def get_help_option(self, ctx: Any) -> TyperOption | None:
        """Return the help option with a default that needs no conversion."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.default = False
        return option
