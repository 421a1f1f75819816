"""Tables at the width of a terminal: no line is too long, and each row is one line."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from tierd.cli.tables import Table, lay_out_table, wrap_text

COLUMNS = ("RUN", "STEP", "ATTEMPT", "WHERE", "STATE", "KEPT BECAUSE")
A, B = "018f0aab1234-00000001", "018f0aab1234-00000002"
ROWS = [
    ("bert-large", "30", A, "local", "committed", "newest"),
    ("bert-large", "30", A, "s3", "verified", "newest, and the last one of its launch; it is also pinned there"),
    ("bert-large", "30", B, "s3", "verified", "newest"),
]


def test_each_row_is_one_line_and_its_last_columns_are_left_out() -> None:
    assert lay_out_table(COLUMNS, ROWS, 61) == [
        "RUN         STEP  ATTEMPT                WHERE  STATE",
        f"bert-large  30    {A}  local  committed",
        f"bert-large  30    {A}  s3     verified",
        f"bert-large  30    {B}  s3     verified",
    ]
    assert lay_out_table(COLUMNS, ROWS, 90)[2].endswith("verified   newest, and the last one of it…")
    assert lay_out_table(COLUMNS, ROWS, None)[2].endswith(ROWS[1][-1])


def test_names_are_cut_in_their_middle_and_sentences_at_their_end() -> None:
    rows = [("a" * 20 + "b" * 20, "because " * 5, "end")]
    assert (
        lay_out_table(("FILE", "WHY", "LAST"), rows, 50)[1]
        == "a" * 10 + "…" + "b" * 10 + "  because because beca…  end"
    )


def test_terminal_has_no_column_without_text() -> None:
    rows = [("a" * 30, "", "b" * 30)]
    assert lay_out_table(("ONE", "TWO", "THREE"), rows, 80) == [f"{'ONE':30}  THREE", f"{'a' * 30}  {'b' * 30}"]
    assert "TWO" in lay_out_table(("ONE", "TWO", "THREE"), rows, None)[0]


def test_layout_breaks_a_single_word_that_is_too_wide() -> None:
    assert wrap_text("a" * 25, 10) == ["a" * 10, "a" * 10, "a" * 5]
    assert wrap_text("日本語日本語", 5) == ["日本", "語日", "本語"]
    assert lay_out_table(("FILE",), [("a" * 25,)], 20) == ["FILE", "a" * 19 + "…"]


def test_table_without_rows_is_its_heads_through_a_pipe_alone() -> None:
    table = Table(("FILE", "BYTES"), [], title="run")
    assert table.lines(80) == [] and table.lines(None) == ["run", "FILE  BYTES"]


CELLS = st.text(st.characters(categories=["L", "N", "P"]) | st.just(" "), max_size=60)


@given(st.integers(12, 120), st.data())
def test_layout_gives_each_row_a_line_of_the_width(width: int, data: st.DataObject) -> None:
    columns = tuple(f"C{number}" for number in range(data.draw(st.integers(1, 6))))
    rows = data.draw(st.lists(st.tuples(*[CELLS] * len(columns)), max_size=5))
    lines = lay_out_table(columns, rows, width)
    assert all(cell_len(line) <= width for line in lines) and len(lines) == len(rows) + 1
    whole = lay_out_table(columns, rows, None)
    assert all(cell.rstrip() in line for row, line in zip(rows, whole[1:], strict=True) for cell in row)
