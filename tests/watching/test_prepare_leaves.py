"""`prepare` and `restore --into`: what a person chose, what cannot be read, and what tierd itself left behind."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import layouts
from support.watched_run import RUN, files, flush, take
from support.world import commit, part

from tierd.cli import run
from tierd.spool.spool import Spool
from tierd.watching import directory_tree as watching_files
from tierd.watching.directory_tree import TIERD_PREFIX

CHOSEN = ".tierd-chosen"


def aged(root: Path, seconds: int) -> None:
    for path in root.rglob("*"):
        if path.is_file() and not path.is_symlink():
            os.utime(path, ns=(0, path.stat().st_mtime_ns - seconds * 10**9))


def deepspeed(root: Path, *steps: int) -> None:
    """DeepSpeed's checkpoints of these steps, a minute apart; `latest` names the last one."""
    for step in steps:
        layouts.version = float(step)
        aged(root, 60)
        fresh = root.with_name("fresh")
        layouts.deepspeed(fresh)
        (fresh / "global_step20").rename(root / f"global_step{step}")
        shutil.rmtree(fresh)
        (root / "latest").write_text(f"global_step{step}")


def plain(root: Path, *steps: int) -> None:
    """Files of torch.save with these steps in their names, a minute apart."""
    for step in steps:
        layouts.version = float(step)
        aged(root, 60)
        layouts.pt(root / f"a-{step}.pt")


class Node:
    """A program's directory on a node, and the tier."""

    def __init__(self, home: Path, name: str) -> None:
        self.root, self.tier = home / name, home / "tier"
        self.spool = Spool(home / f".{name}.tierd")
        self.root.mkdir()

    def taken(self) -> None:
        assert take(self.spool, self.root).parts
        flush(self.spool, self.tier)

    def restore(self, *arguments: str) -> int:
        return run(["restore", str(self.tier), "--run", RUN, "--into", str(self.root), *arguments])

    def prepare(self, capsys: pytest.CaptureFixture[str]) -> dict:
        capsys.readouterr()
        assert run(["prepare", str(self.root), "--run", RUN, "--to", str(self.tier), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    def verdicts(self, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
        return {one["path"]: one["verdict"] for one in self.prepare(capsys)["units"]}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path, "d")


@contextmanager
def unreadable(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[None]:
    """Refuse to open paths with this name in them, as the kernel does for another account."""
    opened = watching_files.DirectoryTree.opened

    def refused(self, path, listed):
        if name in path:
            raise PermissionError(13, "Permission denied")
        return opened(self, path, listed)

    with monkeypatch.context() as patch:
        patch.setattr(watching_files.DirectoryTree, "opened", refused)
        yield


# -- a choice is kept -------------------------------------------------------------------------------------------------


def test_pointer_to_a_unit_that_is_gone_names_it_again_when_it_is_back(node: Node, capsys) -> None:
    deepspeed(node.root, 10, 20, 30)
    node.taken()
    shutil.rmtree(node.root / "global_step30")
    for _ in range(2):
        node.prepare(capsys)
        assert (node.root / "latest").read_text() == "global_step30" and (node.root / "global_step30").is_dir()


def test_a_pointer_to_a_whole_older_unit_is_left(node: Node, capsys) -> None:
    deepspeed(node.root, 10, 20, 30)
    node.taken()
    (node.root / "latest").write_text("global_step20")
    found = node.prepare(capsys)
    assert {one["verdict"] for one in found["units"]} == {"verified"} and found["pointers"] == []
    assert (node.root / "latest").read_text() == "global_step20"


def test_restored_step_is_still_named_by_the_pointer(node: Node, capsys) -> None:
    deepspeed(node.root, 10, 20, 30)
    node.taken()
    assert node.restore("--step", "20") == 0
    assert node.prepare(capsys)["pointers"] == []
    assert (node.root / "latest").read_text() == "global_step20"


@pytest.mark.parametrize("text", ["global_step999", "\x01../../etc", None])
def test_a_pointer_to_nothing_is_corrected(node: Node, text: str | None, capsys) -> None:
    deepspeed(node.root, 10, 20)
    node.taken()
    if text is None:
        (node.root / "latest").unlink()
    else:
        (node.root / "latest").write_text(text)
    assert node.prepare(capsys)["pointers"] == ["latest"]
    assert (node.root / "latest").read_text() == "global_step20"


@pytest.mark.parametrize(("age_s", "named"), [(0, "global_step30"), (1000, "global_step20")])
def test_a_pointer_to_a_newer_unit_that_cannot_be_checked_is_left(node: Node, age_s: int, named: str, capsys) -> None:
    deepspeed(node.root, 10, 20)
    node.taken()
    deepspeed(node.root, 30)
    (node.root / "global_step30" / "extra.bin").write_bytes(b"\1\0\0\0of no known format")
    aged(node.root / "global_step30", age_s)
    shutil.rmtree(node.root / "global_step10")
    shutil.rmtree(node.root / "global_step20")
    assert node.verdicts(capsys) == {"global_step20": "missing", "global_step30": "unknown"}
    assert (node.root / "latest").read_text() == named


def test_a_chosen_step_on_a_new_node_is_not_overtaken(tmp_path: Path, capsys) -> None:
    first = Node(tmp_path, "first")
    plain(first.root, 5, 6, 7)
    first.taken()
    node = Node(tmp_path, "back")
    assert node.restore("--step", "6") == 0
    assert node.verdicts(capsys) == {"a-6.pt": "verified"} and sorted(files(node.root)) == ["a-6.pt"]
    (node.root / "a-6.pt").unlink()  # the choice itself comes back
    assert node.verdicts(capsys) == {"a-6.pt": "missing"}
    assert sorted(files(node.root)) == ["a-6.pt"]


def test_a_choice_ends_with_newer_checkpoints_or_by_the_newest(tmp_path: Path, capsys) -> None:
    first = Node(tmp_path, "first")
    plain(first.root, 5, 6)
    aged(first.root, 600)
    first.taken()
    node = Node(tmp_path, "back")
    assert node.restore("--step", "5") == 0
    layouts.pt(first.root / "a-7.pt")  # the program went on, on the other node
    first.taken()
    assert node.verdicts(capsys) == {"a-5.pt": "verified", "a-7.pt": "missing"}
    assert node.restore("--step", "5") == 0 and (node.root / CHOSEN).exists()
    assert node.restore() == 0 and not (node.root / CHOSEN).exists()


def test_a_choice_passes_over_no_later_save_for_a_time_in_the_future(tmp_path: Path, capsys) -> None:
    first = Node(tmp_path, "first")
    plain(first.root, 5, 6)
    aged(first.root, -3600)
    first.taken()
    node = Node(tmp_path, "back")
    assert node.restore("--step", "5") == 0
    layouts.pt(first.root / "a-7.pt")
    first.taken()
    assert node.verdicts(capsys) == {"a-5.pt": "verified", "a-7.pt": "missing"}


@pytest.mark.parametrize(("year", "found"), [("2001", ["a-6.pt"]), ("2060", [])])
def test_a_choice_that_an_older_tierd_wrote_is_obeyed(node: Node, year: str, found: list[str], capsys) -> None:
    plain(node.root, 6)
    node.taken()
    (node.root / "a-6.pt").unlink()
    choice = {"run": RUN, "step": 5, "attempt": "0" * 12 + "-" + "0" * 8, "passed_over": f"{year}-01-01T00:00:00Z"}
    (node.root / CHOSEN).write_text(json.dumps(choice))
    assert [*node.verdicts(capsys)] == found


def test_a_choice_that_cannot_be_read_is_named(node: Node, capsys) -> None:
    plain(node.root, 5)
    node.taken()
    (node.root / CHOSEN).write_text('{"run": 1}')
    assert run(["prepare", str(node.root), "--run", RUN, "--to", str(node.tier)]) == 3
    assert f"{node.root / CHOSEN}: " in capsys.readouterr().err


# -- what cannot be read proves nothing -------------------------------------------------------------------------------


def test_newer_unit_that_cannot_be_read_is_kept_and_named(node: Node, capsys, monkeypatch) -> None:
    deepspeed(node.root, 30)
    node.taken()
    deepspeed(node.root, 50)
    before = files(node.root)
    with unreadable(monkeypatch, "global_step50"):
        assert run(["prepare", str(node.root), "--run", RUN, "--to", str(node.tier)]) == 6
    assert files(node.root) == before and (node.root / "latest").read_text() == "global_step50"
    assert not (node.root / ".tierd-quarantine").exists()
    reported = capsys.readouterr().err
    assert "global_step50" in reported and "Nothing was moved" in reported


def test_a_taken_unit_that_cannot_be_read_is_not_replaced(node: Node, capsys, monkeypatch) -> None:
    plain(node.root, 3, 4)
    node.taken()
    before = files(node.root)
    with unreadable(monkeypatch, "a-4.pt"):
        assert run(["prepare", str(node.root), "--run", RUN, "--to", str(node.tier)]) == 6
    assert files(node.root) == before and not (node.root / ".tierd-quarantine").exists()
    assert "a-4.pt" in capsys.readouterr().err


# -- what tierd left --------------------------------------------------------------------------------------------------


def test_a_fetch_that_was_cut_off_is_no_checkpoint(node: Node, capsys, monkeypatch) -> None:
    plain(node.root, 3, 4)
    node.taken()
    right = files(node.root)
    shutil.rmtree(node.root)
    node.root.mkdir()

    def cut(*_: object, **__: object) -> None:
        raise OSError(5, "cut off")

    with monkeypatch.context() as patch:
        patch.setattr("tierd.daemon.transfer.restore_to_directory.publish_directory", cut)
        assert run(["prepare", str(node.root), "--run", RUN, "--to", str(node.tier)]) == 1
    left = [path.name for path in node.root.iterdir()]
    assert left and all(name.startswith(TIERD_PREFIX) for name in left)
    assert take(node.spool, node.root).reasons == {}
    assert node.verdicts(capsys) == {"a-4.pt": "missing"}
    assert files(node.root) == {"a-4.pt": right["a-4.pt"]} and not (node.root / ".tierd-quarantine").exists()


@pytest.mark.parametrize("command", ["restore", "prepare"])
def test_a_run_that_was_not_watched_is_not_fetched(tmp_path: Path, command: str, capsys, monkeypatch) -> None:
    spool, tier, out = Spool(tmp_path / "spool"), tmp_path / "tier", tmp_path / "out"
    commit(spool, part(10, run=RUN))
    flush(spool, tier)

    def fetched(*_: object, **__: object) -> None:
        raise AssertionError("a file was fetched")

    monkeypatch.setattr("tierd.daemon.transfer.restore_to_directory.download", fetched)
    where = ["--into", str(out)] if command == "restore" else ["--to", str(tier)]
    arguments = [str(tier) if command == "restore" else str(out), "--run", RUN, *where]
    assert run([command, *arguments]) == 3
    assert "no `tierd watch` took it" in capsys.readouterr().err and list(out.iterdir()) == []


# -- what is told -----------------------------------------------------------------------------------------------------


def test_edit_after_the_save_is_distinguished_from_decay(node: Node, capsys) -> None:
    path = layouts.trainer(node.root) / "trainer_state.json"
    aged(node.root, 600)
    node.taken()
    was = path.stat().st_mtime_ns
    path.write_text(path.read_text().replace("}", ', "max_steps": 9}'))
    (one,) = node.prepare(capsys)["units"]
    assert one["verdict"] == "damaged" and "it was written to at " in one["why"]
    path.write_bytes(path.read_bytes().replace(b"loss", b"lose"))
    os.utime(path, ns=(was, was))
    (one,) = node.prepare(capsys)["units"]
    assert one["verdict"] == "damaged" and "written to" not in one["why"]


@pytest.mark.parametrize("number", [13, 30])
def test_a_directory_that_may_not_be_written_to_is_named(node: Node, number: int, capsys, monkeypatch) -> None:
    plain(node.root, 3)
    node.taken()
    (node.root / "a-3.pt").write_bytes(b"")

    def refused(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), ".tierd-restored.partial")

    monkeypatch.setattr(Path, "rename", refused)
    monkeypatch.setattr("tierd.daemon.transfer.restore_to_directory.locked_partial", refused)
    assert run(["prepare", str(node.root), "--run", RUN, "--to", str(node.tier)]) == 3
    assert f"{node.root}: this account may not write there" in capsys.readouterr().err
    assert node.restore() == 3


def test_prepare_names_the_existing_runs_for_a_run_that_no_place_has(node: Node, capsys) -> None:
    plain(node.root, 3)
    node.taken()
    fresh = node.root.with_name("fresh")
    assert run(["prepare", str(fresh), "--run", "typo", "--to", str(node.tier)]) == 0
    assert f"run 'typo': no place has a checkpoint of it; the runs there are: {RUN}" in capsys.readouterr().err
    assert run(["prepare", str(fresh), "--run", RUN, "--to", str(node.tier)]) == 0
    assert "no place" not in capsys.readouterr().err
    assert run(["prepare", str(fresh), "--run", RUN]) == 3
    assert "--to URL" in (reported := capsys.readouterr().err) and "--config" not in reported
