"""Tables and wrapped text at the width of a terminal.

Invariant: no line is wider than asked for, and a row is one line. A table leaves out text only if it has a width.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tierd.core.errors import printable

_GAP = 2  # columns of the terminal
_MIN_CUT_WIDTH = 20  # columns that cut text needs to say anything


def lay_out_table(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """Lay out a table of printable cells, each row as one line.

    On a terminal, columns without text are left out, the widest columns share the room, and the last ones are left out
    for want of it. Text is cut at its end, and a name or a URL in its middle, because names differ anywhere.

    Args:
        width: of the lines, in columns of the terminal; None: as wide as the text is.
    """
    table = (columns, *rows)
    widths = [max(map(_width, column)) for column in zip(*table, strict=True)]
    shown = [*range(len(columns))]
    if width is not None:
        shown = [at for at in shown if any(row[at] for row in rows)] or [0]
        while (limit := _fitting_limit([widths[at] for at in shown], width)) < _MIN_CUT_WIDTH and len(shown) > 1:
            shown.pop()
        widths = [min(cell_width, limit) for cell_width in widths]
    return [
        (" " * _GAP)
        .join(
            _padded(cut_text(row[at], widths[at], middle=at != shown[-1] and " " not in row[at]), widths[at])
            for at in shown
        )
        .rstrip()
        for row in table
    ]


def _fitting_limit(widths: Sequence[int], width: int) -> int:
    """Return the largest width at which cells can be cut so that a row fits."""
    room = width - _GAP * (len(widths) - 1)
    if sum(widths) <= room:
        return max(*widths, _MIN_CUT_WIDTH)
    return next((limit for limit in range(room, 0, -1) if sum(min(each, limit) for each in widths) <= room), 1)


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


@dataclass(frozen=True, slots=True)
class Table:
    """A table without borders. Its cells are shown as `printable` has them.

    Attributes:
        columns: the heads.
        rows: the cells.
        title: a line above; None: none.
    """

    columns: Iterable[str]
    rows: Iterable[Iterable[str]]
    title: str | None = None

    def lines(self, width: int | None) -> list[str]:
        """Return the lines for a terminal of this width; None: as wide as the text is."""
        rows = [[*map(printable, row)] for row in self.rows]
        if width is not None and not rows:
            return []  # the command says in words that there is nothing
        title = [printable(self.title)] if self.title else []
        if width is not None:
            title = [cut_text(line, width) for line in title]
        return [*title, *lay_out_table([*self.columns], rows, width)]
