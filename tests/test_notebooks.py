"""What a notebook shows of a `Checkpointer`, a `Restored` and a `Reader`: one line, and a table without live markup."""

from __future__ import annotations

from pathlib import Path

import tierd
from tierd.core.units import html_table


def test_objects_show_themselves(tmp_path: Path) -> None:
    state = {"weights": [1, 2, 3]}
    with tierd.Checkpointer(tmp_path / "spool", run="bert", to=[]) as checkpointer:
        checkpointer.save(5, state, metrics={"loss": 0.25}).wait()
        restored = checkpointer.restore(dict(state))
        assert repr(checkpointer) == f"<Checkpointer of run 'bert' in {tmp_path}/spool: 1 saves durable>"
        assert "<td>1</td>" in checkpointer._repr_html_()
    assert restored is not None
    assert repr(restored) == f"<Restored step 5 (attempt {restored.attempt}) from local, loss 0.25>"
    assert "<td>loss</td><td>0.25</td>" in restored._repr_html_()
    (tmp_path / "tier").mkdir()
    with tierd.open(tmp_path / "tier", "bert") as reader:
        assert repr(reader) == "<Reader of run 'bert' on file>"
        assert "run bert" in reader._repr_html_()


def test_table_of_a_notebook_has_no_markup_of_others() -> None:
    shown = html_table("<b>", ("<i>",), [("<script>", "\u202e")])
    assert "<script>" not in shown and "<b>" not in shown and "<i>" not in shown and "\u202e" not in shown
