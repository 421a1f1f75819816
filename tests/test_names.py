"""What `make lint` says of identifiers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import names


@pytest.mark.parametrize("name", ["one", "found", "_seen", "_KEPT", "is_named", "all_of_them", "next_one", "Wanted"])
def test_name_without_a_noun_is_homely(name: str) -> None:
    assert names.is_homely(name)


@pytest.mark.parametrize(
    "name", ["checkpoint", "found_part", "held_bytes", "is_due", "lost_s", "it", "_", "old", "onerous"]
)
def test_name_with_a_noun_is_not_homely(name: str) -> None:
    assert not names.is_homely(name)


def test_each_form_of_binding_counts_once() -> None:
    source = """
import asked
class Said:
    told: int = 0
    def given(self, what, *others, made=None, **rest):
        self.kept = [one for one in what]
        with open(what) as left: pass
        try: pass
        except OSError as lost: pass
        match what:
            case [seen]: pass
        return (gone := 1)
async def went(): pass
"""
    found = sorted(name for name, _ in names.bindings(names.ast.parse(source)) if names.is_homely(name))
    expected = "Said given gone kept left lost made one others rest seen told went what"
    assert found == expected.split()


def test_share_and_homonyms_are_findings(tmp_path: Path) -> None:
    (tmp_path / "first.py").write_text("found = 1\nclass Part: pass\n")
    (tmp_path / "second.py").write_text("".join(f"name_{i} = {i}\n" for i in range(31)) + "class Part: pass\n")
    assert names.findings(tmp_path) == []
    (tmp_path / "third.py").write_text("one = 1\n" + "".join(f"class C{i}: pass\n" for i in range(8)))
    (tmp_path / "fourth.py").write_text("".join(f"class C{i}: pass\n" for i in range(8)))
    findings = names.findings(tmp_path)
    *places, share = findings[:3]
    assert places == [f"{tmp_path}/first.py:1: found", f"{tmp_path}/third.py:1: one"]
    assert share.startswith("2 of 51 names say nothing (3.9%, at most 3%)")
    assert findings[-1].startswith("9 class names are defined twice, at most 8")


def test_names_of_tierd_are_nouns() -> None:
    assert names.findings(names.ROOT / "tierd") == []
