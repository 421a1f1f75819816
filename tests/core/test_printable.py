"""What is shown holds nothing that a terminal obeys, or that turns a line around, and still says what is there."""

from __future__ import annotations

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.core.errors import StoreRefused, printable, printable_json, printable_lines

UNSEEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
anything = st.text(st.characters(exclude_categories=()))


def unseen(text: str, *spared: str) -> list[str]:
    return [one for one in text if unicodedata.category(one) in UNSEEN and one not in spared]


@given(anything)
def test_nothing_unseen_is_left_and_nothing_else_is_changed(text):
    shown = printable(text)
    assert not unseen(shown)
    assert printable(shown) == shown
    assert shown == text or unseen(text)
    kept = [one for one in text if unicodedata.category(one) not in UNSEEN]
    assert len(shown) >= len(kept) and (not text or shown)


@pytest.mark.parametrize("code", range(0x110000)[::4096])
def test_every_character_of_unicode(code):
    for one in map(chr, range(code, code + 4096)):
        assert unseen(printable(one)) == [] and (printable(one) == one) is (unicodedata.category(one) not in UNSEEN)


def test_escapes_are_those_of_python():
    assert printable("a\x9b31m\u202e\u2028\U000e0001\ud800\n\x1bé 日本\u3000\\") == (
        "a\\x9b31m\\u202e\\u2028\\U000e0001\\ud800\\n\\x1bé 日本\u3000\\"
    )
    assert printable(StoreRefused("403: \u202eno")) == "403: \\u202eno"


def test_a_line_of_others_passes_for_none_of_tierds_own():
    assert printable_lines("one\ntierd: two\r\x85three") == "one\n  tierd: two\\r\\x85three"


@given(st.recursive(anything | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(anything, inner)))
def test_json_says_the_same_and_holds_nothing_unseen(value):
    text = json.dumps(value, ensure_ascii=False, indent=1)
    shown = printable_json(text)
    assert json.loads(shown) == json.loads(text) and not unseen(shown, "\n")
