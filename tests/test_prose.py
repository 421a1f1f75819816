"""What `make lint` says of words that the glossary replaces, and of public names without a docstring."""

from __future__ import annotations

import sys
import types

from tools import prose


def test_the_pages_and_the_public_names_are_in_order() -> None:
    assert prose.findings() == []


def test_old_word_is_reported_with_its_place_and_the_better_word() -> None:
    page = "A daemon heals it.\n\n```\nheals\n```\n\n    heals\n\nThe event `healed` is sent.\nLaw: none.\n"
    assert prose.old_words("page.md", page) == [
        "page.md:1: 'heals': write repair",
        "page.md:10: 'Law:': write invariant",
    ]


def test_an_old_word_in_a_docstring_or_a_comment_is_named_and_none_in_code() -> None:
    source = '''"""A daemon.

It heals.
"""


def heals(lane):
    """Return `heals`."""
    return "set aside"  # whoever asks
'''
    assert prose.old_words("module.py", source) == [
        "module.py:3: 'heals': write repair",
        "module.py:9: 'whoever': write the actor's name",
    ]


def test_old_word_in_the_name_of_a_test_is_reported_with_its_place() -> None:
    source = """
def test_what_is_pinned_stays(): ...
async def test_one_that_is_pinned(): ...
def test_another_one(): ...
def test_prune_keeps_one_pinned_checkpoint_of_two(): ...
def what_stays(): ...
"""
    assert prose.old_names("tests/test_a.py", source) == [
        "tests/test_a.py:2: test_what_is_pinned_stays: 'what': write the noun",
        "tests/test_a.py:2: test_what_is_pinned_stays: 'stays': write is deleted, is restored, is kept, or continues",
        "tests/test_a.py:3: test_one_that_is_pinned: 'one_that': write the noun",
        "tests/test_a.py:4: test_another_one: 'one': write the noun",
        "tests/test_a.py:4: test_another_one: 'another_one': write the noun",
    ]


def test_the_glossary_has_the_words_that_are_to_be_used() -> None:
    glossary = (prose.ROOT / "docs" / "glossary.md").read_text()
    assert {word for word in ("invariant", "quarantine", "repair", "shared chunk") if word not in glossary} == set()


def test_a_public_name_without_a_docstring_is_named(monkeypatch) -> None:
    module = types.ModuleType("some")

    class Documented:
        """It is."""

        def silent(self) -> None:
            pass

        def _private(self) -> None:
            pass

    module.Documented = Documented  # type: ignore[attr-defined]
    module.__all__ = ["Documented"]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some", module)
    assert prose.undocumented("some") == ["some.Documented.silent: no docstring"]
