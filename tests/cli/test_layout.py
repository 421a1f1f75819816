"""Tables at the width of a terminal: every text is there, no line is too long, and heads stand above their columns."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from tierd.cli.tables import lay_out_table, wrap_text

COLUMNS = ("RUN", "STEP", "ATTEMPT", "WHERE", "STATE", "KEPT BECAUSE")
A, B = "018f0aab1234-00000001", "018f0aab1234-00000002"
ROWS = [
    ("bert-large", "30", A, "local", "committed", "newest"),
    ("bert-large", "30", A, "s3", "verified", "newest, and the last one of its launch; it is also pinned there"),
    ("bert-large", "30", B, "s3", "verified", "newest"),
]


def test_rows_that_do_not_fit_take_several_lines() -> None:
    assert lay_out_table(COLUMNS, ROWS[1:], 61) == [
        "RUN         STEP  ATTEMPT                WHERE  STATE",
        "    KEPT BECAUSE",
        f"bert-large  30    {A}  s3     verified",
        "    newest, and the last one of its launch; it is also pinned",
        "    there",
        f"bert-large  30    {B}  s3     verified",
        "    newest",
    ]


def test_a_column_without_text_takes_no_room_where_there_is_none() -> None:
    rows = [("a" * 30, "", "b" * 30)]
    assert lay_out_table(("ONE", "TWO", "THREE"), rows, 62) == [f"{'ONE':30}  THREE", f"{'a' * 30}  {'b' * 30}"]
    assert "TWO" in lay_out_table(("ONE", "TWO", "THREE"), rows, 80)[0]


def test_layout_breaks_a_single_word_that_is_too_wide() -> None:
    assert wrap_text("a" * 25, 10) == ["a" * 10, "a" * 10, "a" * 5]
    assert wrap_text("日本語日本語", 5) == ["日本", "語日", "本語"]
    assert lay_out_table(("FILE", "BYTES"), [("a" * 25, "3")], 20) == ["FILE", "    BYTES", "a" * 20, "a" * 5, "    3"]


def test_a_table_without_any_text_keeps_its_heads() -> None:
    assert lay_out_table(("FILE", "BYTES"), [], 9) == ["FILE", "    BYTES"]
    assert lay_out_table(("FILE", "BYTES"), [("", "")], 9) == ["FILE", "    BYTES", "", ""]


CELLS = st.text(st.characters(categories=["L", "N", "P"]) | st.just(" "), max_size=60)


@given(st.integers(12, 120), st.data())
def test_no_line_is_too_wide_and_no_text_is_lost(width: int, data: st.DataObject) -> None:
    columns = tuple(f"C{number}" for number in range(data.draw(st.integers(1, 6))))
    rows = data.draw(st.lists(st.tuples(*[CELLS] * len(columns)), max_size=5))
    lines = lay_out_table(columns, rows, width)
    assert all(cell_len(line) <= width for line in lines)
    shown = Counter("".join(lines).replace(" ", ""))
    cells = Counter("".join(cell for row in rows for cell in row).replace(" ", ""))
    assert cells <= shown
