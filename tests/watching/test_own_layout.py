"""A person's own rules about which paths are checkpoints: watched, lost, prepared and put back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import layouts
from support.watched_run import files

from tierd.cli import run
from tierd.core.config import from_toml
from tierd.core.errors import ConfigError
from tierd.watching.directory_tree import DirectoryTree
from tierd.watching.loose_units import UserLayout
from tierd.watching.unit import Unit
from tierd.watching.unit_detection import units

pytestmark = pytest.mark.usefixtures("quick", "tier")


def write(root: Path, *paths: str) -> None:
    for path in paths:
        layouts.text(root / path, f"the bytes of {path}")


def found(root: Path, *globs: str, step: str | None = None, complete_when: str | None = None) -> dict[str, Unit]:
    with DirectoryTree(root, user_layout=UserLayout(globs, step, complete_when)) as tree:
        return {unit.path: unit for unit in units(tree.listing())}


# -- which paths ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("glob", "paths"),
    [
        ("ckpts/*", ["ckpts/a", "ckpts/b.bag"]),
        ("ckpts/*.bag", ["ckpts/b.bag"]),
        ("*/a", ["ckpts/a", "other/a"]),
        ("**/x", ["ckpts/a/x", "other/a/x", "x"]),
        ("**", ["ckpts", "other", "x"]),
        ("ckpts/.*", ["ckpts/.tmp"]),
        ("ckpts/[ab]", ["ckpts/a"]),
        ("nothing", []),
    ],
)
def test_glob_matches_whole_paths(glob: str, paths: list[str], root: Path) -> None:
    write(root, "ckpts/a/x", "ckpts/b.bag", "ckpts/.tmp", "other/a/x", "x")
    assert list(found(root, glob)) == paths


def test_matched_directory_is_one_unit_with_everything_below_it(root: Path) -> None:
    layouts.trainer(root / "saves" / "one")
    layouts.torch_save(root / "saves" / "one" / "inner")
    write(root, "saves/one/notes.txt", "saves/one/.hidden/x", "saves/log.txt")
    unit = found(root, "saves/one")["saves/one"]
    assert {*unit.files} == {f"saves/one/{path}" for path in files(root / "saves" / "one")}
    assert unit.missing_reason is None and unit.layout.program == "own layout"


def test_no_other_rule_applies_beside_matched_paths(root: Path) -> None:
    layouts.torch_save(root)
    layouts.trainer(root)
    write(root, "saves/a")
    assert list(found(root, "saves/*")) == ["saves/a"]


def test_links_are_no_units(root: Path) -> None:
    write(root, "real/a")
    (root / "link").symlink_to("real")
    assert list(found(root, "*")) == ["real"]


# -- steps ---------------------------------------------------------------------------


def test_step_is_the_last_match_in_the_path(root: Path) -> None:
    write(root, "job_7/at_100/w", "job_7/at_x/w", "job_7/at_99999999999999999999/w")
    steps = {path: unit.step for path, unit in found(root, "*/*", step=r"_(\d+)").items()}
    assert steps == {"job_7/at_100": 100, "job_7/at_x": 7, "job_7/at_99999999999999999999": 7}
    assert found(root, "*/at_x", step=r"at_(\d+)")["job_7/at_x"].step is None


def test_step_is_the_number_in_the_name_without_a_rule(root: Path) -> None:
    write(root, "step_3/w", "m-4.pt")
    assert {path: unit.step for path, unit in found(root, "*").items()} == {"step_3": 3, "m-4.pt": 4}


# -- complete ---------------------------------------------------------------------------


def test_unit_is_complete_only_with_the_file_within_it(root: Path) -> None:
    write(root, "a/w", "a/meta/DONE", "b/w")
    both = found(root, "*", complete_when="meta/DONE")
    assert (both["a"].missing_reason, both["a"].markers) == (None, ("a/meta/DONE",))
    assert (both["b"].missing_reason, both["b"].is_unfinished) == ("b/meta/DONE is not there", False)


def test_unit_is_complete_only_with_the_file_beside_it_which_belongs_to_it(root: Path) -> None:
    write(root, "a.bin", "a.bin.done", "b.bin", "c/w", ".c.ok")
    beside = found(root, "*", complete_when="{name}.done")
    assert {path: unit.missing_reason for path, unit in beside.items()} == {
        "a.bin": None,
        "b.bin": "b.bin.done is not there",
        "c": "c.done is not there",
    }
    assert beside["a.bin"].files == ("a.bin", "a.bin.done")
    assert found(root, "c", complete_when=".{name}.ok")["c"].files == (".c.ok", "c/w")


def test_file_has_no_completion_file_within_it(root: Path) -> None:
    write(root, "a.bin")
    assert "{name}" in (found(root, "*", complete_when="DONE")["a.bin"].missing_reason or "")


# -- in the configuration ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("step = '(x)'", "watch[0].unit: give it with step"),
        ("unit = ['/a']", "write a path from the directory"),
        ("unit = ['../a']", "write a path from the directory"),
        ("unit = ['a']\nstep = '('", "not a regular expression"),
        ("unit = ['a']\nstep = '[0-9]+'", "one group"),
        ("unit = ['a']\ncomplete_when = '../DONE'", "watch[0].complete_when"),
    ],
)
def test_rule_that_cannot_be_used_is_refused(more: str, said: str, tmp_path: Path) -> None:
    text = f'spool = "{tmp_path}/s"\n[[tier]]\nname = "t"\nurl = "file://{tmp_path}/t"\n'
    text += f'[[watch]]\ndirectory = "{tmp_path}/out"\nrun = "r"\n{more}\n'
    with pytest.raises(ConfigError, match=r"tierd\.toml") as refused:
        from_toml(text, "tierd.toml")
    assert said in str(refused.value)


# -- by the commands ---------------------------------------------------------------------------

_RULES = ("--unit", "saves/*", "--step", r"at(\d+)", "--complete-when", "{name}.done")


def watched(root: Path, *rules: str) -> int:
    return run(["watch", str(root), "--run", "r", "--to", f"file://{root.parent}/tier", "--until-idle", *rules])


def prepared(root: Path, capsys: pytest.CaptureFixture[str], *rules: str) -> dict[str, dict[str, object]]:
    capsys.readouterr()
    assert run(["prepare", str(root), "--run", "r", "--to", f"file://{root.parent}/tier", "--json", *rules]) == 0
    return {one["path"]: one for one in json.loads(capsys.readouterr().out)["units"]}


def saves(root: Path) -> None:
    """Checkpoints whose parts the usual rules would take for several ones, or would not take."""
    for step in (10, 20):
        here = root / "saves" / f"at{step}"
        layouts.pt(here / "rank_1.pt")
        layouts.pt(here / "step_999" / "model.pt")
        layouts.text(here / "weights.bag", f"{step}")
        layouts.text(root / "saves" / f"at{step}.done", "")
    layouts.text(root / "saves" / "at30" / "weights.bag", "half")


def test_own_layout_is_taken_whole_lost_and_put_back_byte_for_byte(root: Path, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    saves(root)
    assert watched(root, *_RULES) == 0
    right = files(root)
    newest = {path: data for path, data in right.items() if path.startswith("saves/at20")}
    assert run(["restore", str(tmp_path / "tier"), "--run", "r", "--into", str(tmp_path / "back")]) == 0
    assert files(tmp_path / "back") == newest
    assert {*prepared(root, capsys, *_RULES)} == {"saves/at10", "saves/at20", "saves/at30"}
    assert files(root) == right
    empty = tmp_path / "fresh"
    assert prepared_at(empty, root, capsys)["saves/at20"]["verdict"] == "missing"
    assert files(empty) == newest


def prepared_at(directory: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, object]]:
    capsys.readouterr()
    assert run(["prepare", str(directory), "--run", "r", "--to", f"file://{root.parent}/tier", "--json", *_RULES]) == 0
    return {one["path"]: one for one in json.loads(capsys.readouterr().out)["units"]}


def test_checkpoint_that_is_not_complete_yet_is_no_series_of_its_own(root: Path, tmp_path: Path) -> None:
    """The newest of each series is pinned, and one that lacks its completion file beside it has other paths."""
    saves(root)
    assert watched(root, *_RULES) == 0
    assert list((tmp_path / "tier" / "r" / "manifests").iterdir())
    assert not list((tmp_path / "tier").rglob("pins/*"))


def test_prepare_replaces_damaged_unit_and_leaves_incomplete_unit(root: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    saves(root)
    assert watched(root, *_RULES) == 0
    right = files(root)
    bag = root / "saves" / "at20" / "weights.bag"
    bag.write_text("XX")
    judged = prepared(root, capsys, *_RULES)
    assert {path: one["verdict"] for path, one in judged.items()} == {
        "saves/at10": "verified",
        "saves/at20": "damaged",
        "saves/at30": "unknown",
    }
    assert judged["saves/at20"]["replaced"] and files(root) == right


def test_prepare_without_the_rules_moves_nothing_and_names_them(root: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    saves(root)
    assert watched(root, *_RULES) == 0
    right = files(root)
    assert run(["prepare", str(root), "--run", "r", "--to", f"file://{root.parent}/tier"]) == 3
    assert "give prepare the same --unit" in capsys.readouterr().err
    assert files(root) == right


def test_prepare_without_the_rules_knows_a_run_that_only_the_spool_has(root: Path, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    saves(root)
    assert watched(root, *_RULES) == 0
    (tmp_path / "empty").mkdir()
    assert run(["prepare", str(root), "--run", "r", "--to", f"file://{tmp_path}/empty"]) == 3
    assert "give prepare the same --unit" in capsys.readouterr().err


def test_explain_honours_the_rules(root: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    saves(root)
    layouts.torch_save(root)
    assert run(["watch", str(root), "--explain", "--json", *_RULES]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert {unit["path"]: (unit["step"], unit["order"], unit["not_taken"]) for unit in answer["units"]} == {
        "saves/at10": (10, "its path", ""),
        "saves/at20": (20, "its path", ""),
        "saves/at30": (30, "its path", "it is not complete: saves/at30.done is not there"),
    }
    assert answer["units"][0]["why"] == "a glob of --unit matches it; saves/at10.done is there"
    assert [group["why"] for group in answer["passed_over"]] == [
        "no glob of --unit, or of `unit` in a [[watch]], matches it"
    ]


def test_own_layout_without_a_step_is_ordered_by_time(root: Path, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    write(root, "states/alpha/w", "states/beta/w")
    assert watched(root, "--unit", "states/*") == 0
    assert len(list((tmp_path / "tier" / "r" / "manifests").iterdir())) == 2
