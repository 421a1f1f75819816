"""Tables and wrapped text at the width of a terminal.

Invariant: no line is wider than asked for. A table leaves out text only if it was made with `cut`; without a width,
each row is one whole line.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tierd.core.errors import printable

_GAP, _INDENT = 2, 4  # columns of the terminal
_MIN_WRAP_WIDTH = 30  # columns that wrapped text needs to be readable beside others
_MIN_CUT_WIDTH = 20  # columns that cut text needs to say anything


@dataclass(frozen=True, slots=True)
class _Line:
    """One of the lines that each row takes: which columns stand there, and how wide each is."""

    indent: int
    columns: tuple[int, ...]
    widths: tuple[int, ...]

    def of(self, row: Sequence[str]) -> list[str]:
        """Return the cells of a row; several lines if some are wrapped."""
        cells = [wrap_text(row[at], width) for at, width in zip(self.columns, self.widths, strict=True)]
        tall = max(map(len, cells))
        lines = []
        for number in range(tall):
            pieces = [cell[number] if number < len(cell) else "" for cell in cells]
            text = (" " * _GAP).join(map(_padded, pieces, self.widths))
            lines.append((" " * self.indent + text).rstrip())
        return lines


def lay_out_table(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """Lay out a table of printable cells.

    A row that does not fit takes several lines, of which all but the first are indented. Each column stands below its
    head. Columns without any text are left out then, unless no cell has any.

    Args:
        width: of the lines, in columns of the terminal; None: one line a row, however long.
    """
    widths = [max(map(_width, column)) for column in zip(columns, *rows, strict=True)]
    all_columns = range(len(columns))
    if width is None or sum(widths) + _GAP * (len(widths) - 1) <= width:
        line = _Line(0, tuple(all_columns), tuple(widths))
        return [text for row in (columns, *rows) for text in line.of(row)]
    filled_columns = [at for at in all_columns if any(row[at] for row in rows)] or all_columns
    if fitting := _one_line(filled_columns, widths, width):
        return [text for row in (columns, *rows) for text in fitting.of(row)]
    lines = _lines(filled_columns, widths, width)
    return [text for row in (columns, *rows) for line in lines for text in line.of(row)]


def _one_line(columns: Sequence[int], widths: Sequence[int], width: int) -> _Line | None:
    """Return one line of all columns, with the last one wrapped; None if it is too narrow for that."""
    *leading, last = columns
    room = width - sum(widths[at] + _GAP for at in leading)
    if room < min(_MIN_WRAP_WIDTH, widths[last]):
        return None
    return _Line(0, tuple(columns), (*(widths[at] for at in leading), min(widths[last], room)))


def _lines(columns: Sequence[int], widths: Sequence[int], width: int) -> list[_Line]:
    """Distribute columns over lines, in order, of which all but the first are indented."""
    lines: list[_Line] = []
    line_columns: list[int] = []
    room = width
    for at in columns:
        wraps = at == columns[-1] and room >= _MIN_WRAP_WIDTH
        if line_columns and widths[at] > room and not wraps:
            lines.append(_line(line_columns, widths, width, indented=bool(lines)))
            line_columns, room = [], width - _INDENT
        line_columns.append(at)
        room -= widths[at] + _GAP
    return [*lines, _line(line_columns, widths, width, indented=bool(lines))]


def _line(columns: Sequence[int], widths: Sequence[int], width: int, *, indented: bool) -> _Line:
    indent = _INDENT if indented else 0
    *leading, last = columns
    room = width - indent - sum(widths[at] + _GAP for at in leading)
    return _Line(indent, tuple(columns), (*(widths[at] for at in leading), max(1, min(widths[last], room))))


def _padded(cell: str, width: int) -> str:
    return cell + " " * (width - _width(cell))


def _width(cell: str) -> int:
    if cell.isascii():
        return len(cell)
    from rich.cells import (
        cell_len,  # here, because most commands do not need rich, which takes 0.05 CPU seconds to load
    )

    return cell_len(cell)


def wrap_text(cell: str, width: int) -> list[str]:
    """Break text into lines of at most `width`, between words where that is possible."""
    if _width(cell) <= width:
        return [cell]
    if cell.isascii():
        lines = textwrap.wrap(cell, width, replace_whitespace=False, break_on_hyphens=False)
        return [line.rstrip() for line in lines] or [""]
    from rich.console import Console
    from rich.text import Text

    folding = Console(file=io.StringIO(), width=80)  # only for the rules by which rich wraps text
    return [line.plain.rstrip() for line in Text(cell).wrap(folding, width, overflow="fold")]


def cut_text(cell: str, width: int, *, middle: bool = False) -> str:
    """Shorten a cell to `width` columns, with an ellipsis at its end, or in its middle, as for names and URLs."""
    if _width(cell) <= width:
        return cell
    if middle and cell.isascii() and width > 4:
        begin = width // 2
        return f"{cell[:begin]}…{cell[begin + 1 - width :]}"
    if cell.isascii():
        return f"{cell[: width - 1]}…"
    from rich.text import Text

    text = Text(cell)
    text.truncate(width, overflow="ellipsis")
    return text.plain


def _cut_table(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Lay out each row as one line: the widest columns share the room, and the last ones are left out for want of it.

    The last column is cut at its end, because it is a sentence; others in the middle, because names differ anywhere.
    """
    shown = [at for at in range(len(columns)) if any(row[at] for row in rows)] or [0]
    widths = {at: max(map(_width, (columns[at], *(row[at] for row in rows)))) for at in shown}
    while True:
        room = max(1, width - _GAP * (len(shown) - 1))
        limit = next((limit for limit in range(room, 0, -1) if sum(min(widths[at], limit) for at in shown) <= room), 1)
        if limit >= _MIN_CUT_WIDTH or len(shown) == 1 or max(widths[at] for at in shown) <= limit:
            break
        shown.pop()
    line = _Line(0, tuple(shown), tuple(min(widths[at], limit) for at in shown))
    cut_rows = [
        [cut_text(cell, limit, middle=at != shown[-1]) for at, cell in enumerate(row)] for row in (columns, *rows)
    ]
    return [text for row in cut_rows for text in line.of(row)]


@dataclass(frozen=True, slots=True)
class Table:
    """A table without borders. Its cells are shown as `printable` has them.

    Attributes:
        columns: the heads.
        rows: the cells.
        title: a line above; None: none.
        cut: whether each row is one line on a terminal of any width, cut if it has to be; else it takes several.
    """

    columns: Iterable[str]
    rows: Iterable[Iterable[str]]
    title: str | None = None
    cut: bool = False

    def lines(self, width: int | None) -> list[str]:
        """Return the lines for a terminal of this width; None: one for each row."""
        title = [printable(self.title)] if self.title else []
        columns, rows = [*self.columns], [[*map(printable, row)] for row in self.rows]
        if self.cut and width is not None:
            return [*title, *_cut_table(columns, rows, width)]
        return [*title, *lay_out_table(columns, rows, width)]
