# SPDX-License-Identifier: Apache-2.0
"""Help in plain text, options in groups.

Typer's own help with groups imports Rich's Markdown and syntax colours, which takes as long as all
the rest of a start; and a ``--help`` that was not given is None to it, which it converts with
pydantic, as long again.
"""

from typing import Any

from typer.core import TyperCommand, TyperGroup, TyperOption

__all__ = ["CommandGroup", "PlainCommand"]


def _write_groups(command: TyperCommand | TyperGroup, ctx: Any, formatter: Any) -> None:
    """Write the arguments, the options without a group, and each group of options."""
    groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is not None:
            kind = "Options" if isinstance(parameter, TyperOption) else "Arguments"
            group = getattr(parameter, "rich_help_panel", None) or kind
            groups.setdefault(group, []).append(record)
    for title, records in groups.items():
        if records:
            with formatter.section(title):
                formatter.write_dl(records)


class PlainCommand(TyperCommand):
    """A command whose help shows its options in groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options by group."""
        _write_groups(self, ctx, formatter)


class CommandGroup(TyperGroup):
    """A group of commands; its ``--help`` is False when not given."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options, then the commands."""
        _write_groups(self, ctx, formatter)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write every command with the whole first sentence of its help."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    (name, command.get_short_help_str(limit=200))
                    for name, command in self.commands.items()
                ]
            )

    def get_help_option(self, ctx: Any) -> TyperOption | None:
        """Return the help option with a default that needs no conversion."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.default = False
        return option
