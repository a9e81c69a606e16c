"""Rows of CSV files from outside, within a limit on bytes (`read_text`) and on lines."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Final

from distgraph.errors import DistGraphError
from distgraph.serialization.documents import read_text

MOST_LINES: Final = 100_000


def read_csv(path: str | Path, error: type[DistGraphError]) -> list[tuple[int, list[str]]]:
    """(line number, stripped cells) of every row that is neither empty nor a comment (#).

    Raises:
        error: the file cannot be read, is too large, or is no CSV; names the file and the line.
    """
    reader = csv.reader(read_text(Path(path), error).splitlines(), strict=True)
    rows: list[tuple[int, list[str]]] = []
    try:
        for row in reader:
            cells = [cell.strip() for cell in row]
            if any(cells) and not cells[0].startswith("#"):
                rows.append((reader.line_num, cells))
            if reader.line_num > MOST_LINES:
                raise error(
                    f"{path}: has more than {MOST_LINES} lines, the limit for such a file; give fewer"
                )
    except csv.Error as reason:
        raise error(f"{path}, line {reader.line_num}: not CSV: {reason}; fix the line") from None
    return rows
