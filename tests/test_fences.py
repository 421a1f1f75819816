"""Each fence fits the code as it is, and what it names exists, because otherwise only a round of sabotage notices."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression
from faults import page
from faults.fences import KINDS, Fence, collect, planted
from faults.fences.edits import Answer, Assume, Both, LeaveOut, Misfit, Rename, Replace, Returns, Uncaught, Unwrap
from faults.rounds import kept_in
from faults.sabotage import KITS, ROOT, stride

FENCES = collect()
MOST, MOST_LINES = 120, 1_500  # because each fence is one more thing that a change of the code has to carry along


def test_fences_are_few_and_no_two_have_one_name():
    assert len(FENCES) <= MOST
    assert sum(len(path.read_text().splitlines()) for path in (ROOT / "tests/faults/fences").glob("*.py")) <= MOST_LINES
    assert [name for name, number in Counter(fence.name for fence in FENCES).items() if number > 1] == []


def test_each_kind_of_fault_and_each_kit_has_a_fence():
    assert {fence.kind for fence in FENCES} == KINDS.keys()
    assert {fence.by.split()[0] for fence in FENCES} == {*KITS, "pytest"}


def test_each_fence_fits_one_function_and_leaves_a_program(tmp_path):
    """A name that is defined nowhere makes any test red, whatever the test looks for."""
    for number, fence in enumerate(FENCES):
        path, text = planted(fence, ROOT)
        (tmp_path / f"{number}_{path.name}").write_text(text)
    rules = ["--isolated", "--no-cache", "--target-version=py311", "--select=F821,F822,F823", "--output-format=concise"]
    done = subprocess.run([sys.executable, "-m", "ruff", "check", *rules, tmp_path], capture_output=True, text=True)
    undefined = re.findall(r"(\d+)_\w+\.py:\d+:\d+: (.+)", done.stdout)
    assert [(FENCES[int(number)].name, why) for number, why in undefined] == []
    assert done.returncode == 0, done.stderr


def test_the_promise_of_each_fence_is_in_its_page():
    assert [fence.promise for fence in FENCES if fence.promise.partition("#")[2] not in anchors(fence)] == []


def anchors(fence: Fence) -> set[str]:
    """The anchors of a promise's page, and for an invariant those of their numbers."""
    text = (ROOT / fence.promise.partition("#")[0]).read_text()
    invariants = re.findall(r"^(\d)\. ", text.partition("\n## Invariants\n")[2].partition("\n## ")[0], re.MULTILINE)
    headings = {slug(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}
    return headings | {f"invariants-{number}" for number in invariants}


def slug(heading: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_the_run_that_finds_each_fence_exists():
    assert [fence.by for fence in FENCES if not is_selected(fence)] == []


def is_selected(fence: Fence) -> bool:
    """Whether a fence's run selects a test of pytest, or names a kit and its report."""
    kit, *arguments = shlex.split(fence.by)
    if kit != "pytest":
        return kit in KITS and fence.reported != ""
    words = arguments[arguments.index("-k") + 1] if "-k" in arguments else "test"
    chosen, path = Expression.compile(words), Path(arguments[0])
    return any(chosen.evaluate(lambda word, own=own: word.lower() in own) for own in selected_by(ROOT / path))


def selected_by(path: Path) -> list[str]:
    """For each test of a file, the text that an expression of `-k` is compared with, in lower case.

    The values of its parameters stand for their ids, because only pytest knows those, and it takes seconds to collect.
    """
    tests = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    ]
    return [" ".join((path.name, node.name, *map(ast.unparse, node.decorator_list))).lower() for node in tests]


def test_page_shows_every_fence_and_whether_a_run_noticed_it():
    text = page.FENCES_PAGE.read_text()
    assert text == page.put(text, page.fences_table(kept_in(page.RESULTS)["sabotage"]))


def test_a_full_round_plays_each_fence_once_and_a_short_one_starts_all_over_the_list():
    for number in (1, 2, 7, 118, 119):
        assert {seed * stride(number) % number for seed in range(number)} == set(range(number))
    assert len({seed * stride(118) % 118 * 4 // 118 for seed in range(6)}) == 4


CODE = '''
class Shelf:
    def put(self, book, size):
        """Put a book."""
        if size > self.most or book is None:
            raise TooLarge(size)
        try:
            self.books.append(book)
            sync(self.path)
        except FullError as error:
            raise NoRoom(str(error)) from error
        return self.count(book)
'''


@pytest.mark.parametrize(
    "edit, before, after",
    [
        (LeaveOut("sync"), "sync(self.path)", "pass"),
        (Returns("None"), None, "return None"),
        (Assume(False, "size most"), "size > self.most or", "False or"),
        (Assume(True, "book"), "book is None", "True"),
        (Uncaught("FullError"), "except FullError", "except ()"),
        (Rename("FullError", "OSError"), "except FullError", "except OSError"),
        (Answer("count", "1"), "return self.count(book)", "return 1"),
        (Unwrap("count"), "return self.count(book)", "return book"),
        (Replace("sync", "sync_entry()\n..."), "sync(self.path)", "sync_entry()\n            sync(self.path)"),
        (Both(LeaveOut("sync"), Rename("NoRoom", "TooLarge")), "raise NoRoom", "raise TooLarge"),
    ],
    ids=lambda it: type(it).__name__ if not isinstance(it, str | None) else "",
)
def test_an_edit_changes_its_place_and_survives_a_move_of_the_function(tmp_path, edit, before, after):
    home = tmp_path / "tierd" / "furniture"
    home.mkdir(parents=True)
    (home / "shelf.py").write_text(CODE)
    fence = Fence("a shelf", "", "order", "Shelf.put", edit, "")
    path, text = planted(fence, tmp_path)
    assert path == home / "shelf.py"
    assert after in text and (before is None or before not in text.replace(after, ""))

    moved = tmp_path / "moved"
    (moved / "tierd").mkdir(parents=True)
    (moved / "tierd" / "racks.py").write_text("# moved\n" + CODE)
    assert planted(fence, moved) == (moved / "tierd" / "racks.py", text)


@pytest.mark.parametrize(
    "function, edit, why",
    [
        ("Shelf.take", LeaveOut("sync"), "0 functions are called Shelf.take"),
        ("put", LeaveOut("sync"), "0 functions are called put"),
        ("garden:Shelf.put", LeaveOut("sync"), "0 functions are called garden:Shelf.put"),
        ("Shelf.put", LeaveOut("fsync"), "fits 0 places, not 1"),
        ("Shelf.put", Assume(True, "path"), "fits 0 places, not 1"),
        ("Shelf.put", LeaveOut("book"), "fits 2 places, not 1"),
        ("Shelf.put", Replace("sync", "..."), "changes nothing"),
    ],
)
def test_a_fence_that_fits_no_function_no_place_or_several_is_a_misfit(tmp_path, function, edit, why):
    (tmp_path / "tierd").mkdir()
    (tmp_path / "tierd" / "shelf.py").write_text(CODE)
    with pytest.raises(Misfit, match=re.escape(why)):
        planted(Fence("a shelf", "", "order", function, edit, ""), tmp_path)


def test_a_function_of_two_modules_needs_its_module(tmp_path):
    (tmp_path / "tierd" / "attic").mkdir(parents=True)
    for module in ("shelf", "attic/shelf"):
        (tmp_path / "tierd" / f"{module}.py").write_text(CODE)
    fence = Fence("a shelf", "", "order", "Shelf.put", LeaveOut("sync"), "")
    with pytest.raises(Misfit, match="2 functions are called"):
        planted(fence, tmp_path)
    for function in ("attic:Shelf.put", "attic.shelf:Shelf.put"):
        path, _ = planted(Fence("a shelf", "", "order", function, LeaveOut("sync"), ""), tmp_path)
        assert path == tmp_path / "tierd" / "attic" / "shelf.py"
