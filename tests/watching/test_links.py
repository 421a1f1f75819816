"""`tierd inspect` and `import` follow a link within its repository's cache or the named directory, and nowhere else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support import hub_server
from support.users import NOBODY, as_root
from support.watched_run import RUN, files

from tierd.cli import run
from tierd.watching.named_directory import FollowingTree
from tierd.watching.unit_inspection import ChangedFile

COMMIT, OTHER = "c0ffee" * 6 + "3ba1", "ab12" * 10


def hub(home: Path, name: str = "org--name", commit: str = COMMIT, **contents: bytes) -> Path:
    """A snapshot as huggingface_hub leaves it: relative links to blobs, and `refs/main` with the commit."""
    repo = home / f"models--{name}"
    snapshot = repo / "snapshots" / commit
    for directory in (repo / "blobs", repo / "refs", snapshot, repo / ".no_exist" / commit):
        directory.mkdir(parents=True, exist_ok=True)
    (repo / "refs" / "main").write_text(commit)
    (repo / ".no_exist" / commit / "adapter_model.safetensors").touch()
    save_file({"weight": torch.arange(4.0)}, home / "weights", metadata={"format": "pt"})
    blobs = {"model.safetensors": (home / "weights").read_bytes(), "config.json": b'{"model_type": "gpt2"}'}
    (home / "weights").unlink()
    for number, (file, data) in enumerate((blobs | contents).items()):
        blob = repo / "blobs" / f"{number:064x}"
        blob.write_bytes(data)
        (snapshot / file).unlink(missing_ok=True)
        (snapshot / file).symlink_to(f"../../blobs/{blob.name}")
    return snapshot


def inspected(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[dict]]:
    capsys.readouterr()
    code = run(["inspect", "--json", str(path)])
    return code, json.loads(capsys.readouterr().out)["units"]


def imported(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], step: str = "1") -> tuple[int, dict]:
    (tmp_path / "tier").mkdir(exist_ok=True)
    capsys.readouterr()
    code = run(["import", str(path), "--run", RUN, "--to", str(tmp_path / "tier"), "--step", step, "--json"])
    written = capsys.readouterr()
    assert written.out, written.err
    return code, json.loads(written.out)["imported"]


@pytest.mark.parametrize("named", [f"snapshots/{COMMIT}", "refs/main", ".", ".."])
def test_snapshot_of_the_hubs_cache_is_sound_and_imported_as_its_files(
    named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = hub(tmp_path / "hub")
    path = snapshot.parents[1] / named
    code, [unit] = inspected(path, capsys)
    assert (code, unit["status"], unit["files"], unit["step"]) == (0, "sound", 2, None)
    before = {one: one.lstat().st_mtime_ns for one in (tmp_path / "hub").rglob("*") if not one.is_dir()}
    code, answer = imported(path, tmp_path, capsys)
    assert (code, [one["step"] for one in answer["units"]], answer["refused"]) == (0, [1], [])
    assert {one: one.lstat().st_mtime_ns for one in (tmp_path / "hub").rglob("*") if not one.is_dir()} == before
    assert run(["restore", str(tmp_path / "tier"), "--run", RUN, "--into", str(tmp_path / "back")]) == 0
    back = {name.rpartition("/")[2]: data for name, data in files(tmp_path / "back").items()}
    assert back == {name: (snapshot / name).read_bytes() for name in ("model.safetensors", "config.json")}
    assert not any(one.is_symlink() for one in (tmp_path / "back").rglob("*"))


def test_file_of_a_snapshot_is_imported_under_its_own_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = hub(tmp_path / "hub")
    (snapshot / "config.json").unlink()
    code, answer = imported(snapshot / "model.safetensors", tmp_path, capsys)
    assert (code, [one["path"] for one in answer["units"]]) == (0, ["model.safetensors"])


def test_two_revisions_are_two_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub(tmp_path / "hub")
    hub(tmp_path / "hub", commit=OTHER)
    code, units = inspected(tmp_path / "hub", capsys)
    assert (code, sorted(Path(one["path"]).name for one in units)) == (0, sorted((COMMIT, OTHER)))


def test_damaged_blob_is_detected_through_its_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = hub(tmp_path / "hub")
    os.truncate((snapshot / "model.safetensors").resolve(), 100)
    code, [unit] = inspected(snapshot, capsys)
    assert (code, unit["status"]) == (5, "damaged")
    assert unit["findings"][0]["file"].endswith(f"{COMMIT}/model.safetensors")


def outside(kind: str, tmp_path: Path) -> Path:
    """A directory with a checkpoint one file of which is a link that leads out, and a file that it leads to."""
    snapshot = hub(tmp_path / "hub")
    another = hub(tmp_path / "hub", name="org--other")
    blob = (another / "model.safetensors").resolve()
    link = snapshot / "model.safetensors"
    link.unlink()
    if kind == "another repository":
        link.symlink_to(os.path.relpath(blob, snapshot))
    elif kind == "absolute":
        link.symlink_to(shutil.copy(blob, tmp_path / "private"))
    elif kind == "over another link":
        (snapshot.parents[1] / "blobs" / "way").symlink_to(blob)
        link.symlink_to("../../blobs/way")
    elif kind == "over a directory":
        (snapshot.parents[1] / "blobs" / "way").symlink_to(blob.parent)
        link.symlink_to(f"../../blobs/way/{blob.name}")
    return snapshot


@pytest.mark.parametrize("kind", ["another repository", "absolute", "over another link", "over a directory"])
def test_link_that_leads_out_is_refused_with_a_sentence(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = outside(kind, tmp_path)
    code, units = inspected(snapshot, capsys)
    [unit] = [one for one in units if one["findings"]]
    assert (code, unit["status"]) == (4, "unknown")
    assert "a link to " in unit["findings"][0]["reason"] and "not followed" in unit["findings"][0]["reason"]
    code, answer = imported(snapshot, tmp_path, capsys)
    assert (code, answer["units"]) == (4, [])
    [refused] = answer["refused"]
    assert "model.safetensors" in refused["reason"] and "not followed" in refused["reason"]
    assert run(["import", str(snapshot), "--run", RUN, "--to", str(tmp_path / "tier")]) == 4


def test_link_that_leads_out_beside_a_checkpoint_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It may be a part of what is imported, so that an import of the rest alone is not silent."""
    snapshot = hub(tmp_path / "hub")
    (snapshot / "config.json").unlink()
    shutil.copy((snapshot / "model.safetensors").resolve(), tmp_path / "private")
    (snapshot / "adapter_model.safetensors").symlink_to(tmp_path / "private")
    code, answer = imported(snapshot, tmp_path, capsys)
    assert code == 4 and [one["path"] for one in answer["refused"]]
    assert "outside of" in answer["refused"][0]["reason"]


def test_blob_that_is_gone_makes_a_snapshot_incomplete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = hub(tmp_path / "hub")
    (snapshot / "model.safetensors").resolve().unlink()
    code, [unit] = inspected(snapshot, capsys)
    assert (code, unit["status"]) == (4, "incomplete") and "is not there" in unit["findings"][0]["reason"]
    code, answer = imported(snapshot, tmp_path, capsys)
    assert (code, [one["status"] for one in answer["refused"]]) == (4, ["incomplete"])


def test_revision_without_a_snapshot_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = hub(tmp_path / "hub")
    shutil.rmtree(snapshot)
    assert run(["inspect", str(snapshot.parents[1] / "refs" / "main")]) == 4
    assert f"it names the snapshot '{COMMIT}'" in capsys.readouterr().err


def linked_tree(tmp_path: Path) -> Path:
    """A checkpoint one of whose files is a link to another directory beside it, and `last`, which points to it."""
    (tmp_path / "out" / "step_10").mkdir(parents=True)
    (tmp_path / "out" / "base").mkdir()
    torch.save({"step": 10}, tmp_path / "out" / "step_10" / "trained.pt")
    torch.save({"weight": torch.ones(3)}, tmp_path / "out" / "base" / "shared")
    (tmp_path / "out" / "step_10" / "net.pt").symlink_to("../base/shared")
    (tmp_path / "out" / "last").symlink_to("step_10")
    (tmp_path / "out" / "last.pt").symlink_to("step_10/trained.pt")
    return tmp_path / "out"


def test_link_within_the_named_directory_is_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = linked_tree(tmp_path)
    for given in (out, tmp_path / "way"):
        if given != out:
            given.symlink_to(out)
            (out / "step_10" / "net.pt").unlink()
            (out / "step_10" / "net.pt").symlink_to(given / "base" / "shared")  # as a program with that path writes it
        code, [unit] = inspected(given, capsys)
        assert (code, Path(unit["path"]).name, unit["files"]) == (0, "step_10", 2)


def test_named_link_is_the_checkpoint_to_which_it_leads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lightning's `last.ckpt`, for example, whose target's name says the step; also if the user's link leads out."""
    (tmp_path / "out").mkdir()
    torch.save({"global_step": 10}, tmp_path / "out" / "epoch=1-step=10.ckpt")
    (tmp_path / "out" / "last.ckpt").symlink_to("epoch=1-step=10.ckpt")
    (tmp_path / "mine.ckpt").symlink_to("out/epoch=1-step=10.ckpt")
    for link in (tmp_path / "out" / "last.ckpt", tmp_path / "mine.ckpt"):
        code, [unit] = inspected(link, capsys)
        assert (code, unit["step"], unit["path"]) == (0, 10, str(link))


def test_import_of_a_revision_leaves_nothing_in_its_repository(tmp_path: Path, monkeypatch) -> None:
    """`huggingface_hub.scan_cache_dir` reads each directory of a repository."""
    snapshot = hub(tmp_path / "hub")
    (tmp_path / "tier").mkdir()
    seen = set[str]()
    listdir = FollowingTree.listing

    def listing(tree: FollowingTree, name: str | None = None):  # type: ignore[no-untyped-def]
        seen.update(str(path.relative_to(tmp_path)) for path in tmp_path.rglob(".tierd-import-*"))
        return listdir(tree, name)

    monkeypatch.setattr(FollowingTree, "listing", listing)
    main = snapshot.parents[1] / "refs" / "main"
    assert run(["import", str(main), "--run", RUN, "--to", str(tmp_path / "tier"), "--step", "1"]) == 0
    assert {Path(path).parent.name for path in seen} == {"hub"}
    assert not list(tmp_path.rglob(".tierd-import-*"))


def test_link_out_of_the_named_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = linked_tree(tmp_path)
    code, [unit] = inspected(out / "step_10", capsys)
    assert (code, unit["status"]) == (4, "unknown")
    assert f"outside of {out}/step_10" in unit["findings"][0]["reason"]


def test_link_that_is_planted_after_the_listing_is_not_read(tmp_path: Path) -> None:
    """Between the listing and the read, the target or a directory on its path becomes a link to elsewhere."""
    snapshot = hub(tmp_path / "hub")
    secret = tmp_path / "secret"
    secret.mkdir()
    blobs = snapshot.parents[1] / "blobs"
    blob = (snapshot / "model.safetensors").resolve()
    (secret / blob.name).write_bytes(blob.read_bytes())
    path = f"{COMMIT}/model.safetensors"
    for plant in ("file", "directory", "link"):
        with FollowingTree(snapshot.parent, snapshot, snapshot) as tree:
            listing = tree.listing(COMMIT)
            assert listing.entries[path].kind == "file"
            if plant == "file":
                blob.rename(blobs / "away")
                blob.symlink_to(secret / blob.name)
            elif plant == "directory":
                blobs.rename(tmp_path / "blobs")
                blobs.symlink_to(secret)
            else:
                (snapshot / "model.safetensors").unlink()
                (snapshot / "model.safetensors").symlink_to(secret / blob.name)
            if plant == "link":  # the read is of what was listed, and the next listing has the link, which leads out
                assert tree.listing(COMMIT).entries[path].kind == "link"
                assert "outside of" in tree.unfollowed[path][1]
                continue
            with pytest.raises(ChangedFile), tree.opened(path, listing.entries[path]) as source:
                source.read(0, 8)
        if plant == "file":
            blob.unlink()
            (blobs / "away").rename(blob)
        else:
            blobs.unlink()
            (tmp_path / "blobs").rename(blobs)


def test_import_of_a_step_where_nothing_lies_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "last.ckpt").symlink_to("gone.ckpt")
    (tmp_path / "tier").mkdir()
    assert run(["import", str(tmp_path / "out"), "--run", RUN, "--to", str(tmp_path / "tier"), "--step", "1"]) == 4
    assert "no checkpoint of a program that is known lies there" in capsys.readouterr().err


@as_root
def test_private_file_of_another_user_is_not_imported_through_a_link(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who may write in a directory could else publish what only its reader may read there."""
    out = linked_tree(tmp_path)
    (out / "base" / "shared").chmod(0o600)
    for path in (out, out / "step_10", out / "step_10" / "trained.pt"):
        os.chown(path, NOBODY, NOBODY)
    code, answer = imported(out, tmp_path, capsys, "10")
    assert (code, answer["units"]) == (4, [])
    assert "a link of a file of uid 0 that others may not read" in answer["refused"][0]["reason"]
    (out / "base" / "shared").chmod(0o644)
    assert imported(out, tmp_path, capsys, "10")[0] == 0


@pytest.mark.loaders
@pytest.mark.parametrize("named", [f"snapshots/{hub_server.COMMIT}", "refs/main", "."])
def test_download_of_huggingface_hub_is_a_single_checkpoint(
    named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("huggingface_hub")
    subprocess.run([sys.executable, hub_server.__file__, str(tmp_path / "hub")], check=True, timeout=120)
    path = tmp_path / "hub" / "models--org--name" / named
    code, [unit] = inspected(path, capsys)
    assert (code, unit["status"], unit["files"]) == (0, "sound", 3)
    code, answer = imported(path, tmp_path, capsys)
    assert (code, len(answer["units"]), answer["refused"]) == (0, 1, [])
    assert run(["restore", str(tmp_path / "tier"), "--run", RUN, "--into", str(tmp_path / "back")]) == 0
    back = {name.partition(f"{hub_server.COMMIT}/")[2]: data for name, data in files(tmp_path / "back").items()}
    assert back == hub_server.FILES
