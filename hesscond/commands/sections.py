"""``hesscond --help`` with the commands in sections, by what one wants to do."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

#: The sections in order; a command names its own with ``rich_help_panel``.
MEASURE, TRAIN, SHOW, LIST, MACHINE = (
    "Measure and prove",
    "Train and compare methods",
    "Look at runs",
    "What there is",
    "This machine",
)
#: Characters of a summary; it may take two lines.
LONGEST = 160
SECTIONS = (MEASURE, TRAIN, SHOW, LIST, MACHINE)


class SectionedGroup(TyperGroup):
    """Commands listed below the headline of their section."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write all sections; a command without one comes last."""
        found: dict[str, list[tuple[str, str]]] = {section: [] for section in SECTIONS}
        longest = max(len(name) for name in self.commands)
        for name in self.list_commands(ctx):
            command = self.commands[name]
            section = getattr(command, "rich_help_panel", None) or "Other commands"
            summary = command.get_short_help_str(LONGEST)
            found.setdefault(section, []).append((name.ljust(longest), summary))
        for section, rows in found.items():
            if rows:
                with formatter.section(section):
                    formatter.write_dl(rows)
