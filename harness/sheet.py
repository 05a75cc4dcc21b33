"""A text of titled parts and labelled rows for a terminal; whatever it is given is escaped."""

from __future__ import annotations

from harness import safe

LABEL = 16
"""Columns of the labels."""

LEAST_WIDTH = 40
"""Columns. Less is treated as this."""


class Sheet:
    """Lines of a limited width, in titled parts with labels on the left."""

    def __init__(self, width: int) -> None:
        self._width = max(width, LEAST_WIDTH)
        self.lines: list[str] = []

    def line(self, text: str, indent: str = "", hanging: str | None = None) -> None:
        """A text, wrapped; `hanging` indents all but its first line."""
        self.lines += safe.wrap(safe.printable(text), self._width, indent, hanging)

    def title(self, text: str) -> None:
        """Begin a part."""
        self.lines.append("")
        self.line(text, hanging="  ")

    def row(self, label: str, text: str, width: int = LABEL) -> None:
        """A label, and its text beside it; one that is too long stands above it."""
        label = safe.printable(label)
        indent = "  " + " " * width
        if safe.columns(label) >= width:
            self.lines.append(f"  {label}")
            label = ""
        first = "  " + label + " " * (width - safe.columns(label))
        for number, part in enumerate(text.split("\n")):
            self.line(part.strip(), first if number == 0 else indent, indent)

    def code(self, text: str, indent: str = "    ") -> None:
        """Lines that are not broken, to be copied."""
        self.lines += [
            (indent + line).rstrip() for line in safe.printable(text, lines=True).split("\n")
        ]
