"""Tables as text."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(rows: Sequence[Sequence[str]], left: int | None = None, gap: str = "  ") -> list[str]:
    """Lines of a table with columns of equal width.

    Args:
        rows: cells of each line, equally many.
        left: number of columns that are text, flush left; the others are numbers, flush right. None for all.
        gap: between columns.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    count = len(widths) if left is None else left
    lines = []
    for row in rows:
        text = [cell.ljust(width) for cell, width in zip(row[:count], widths, strict=False)]
        numbers = [cell.rjust(width) for cell, width in zip(row[count:], widths[count:], strict=True)]
        lines.append(gap.join(text + numbers).rstrip())
    return lines


def indented_table(rows: Sequence[Sequence[str]]) -> str:
    """A table of texts, indented by two spaces."""
    return "\n".join(f"  {line}" for line in text_table(rows))
