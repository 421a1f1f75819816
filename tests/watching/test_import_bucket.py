"""Checkpoints in a bucket are imported as those in a directory are; names and objects there are trusted in nothing."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support import layouts
from support.layouts import WRITERS
from support.s3stub import Bucket, serving
from support.watched_run import RUN, files
from watching.test_import import check_put_back, checkpoint

from tierd.cli import run
from tierd.core.urls import parse_url
from tierd.daemon.intake import import_bucket as origins
from tierd.daemon.intake.import_bucket import BucketImportSource, bucket_entries, split_url
from tierd.stores.base import ObjectInfo
from tierd.stores.open import open_foreign
from tierd.watching.unit import Listing
from tierd.watching.unit_detection import units


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    with serving(Bucket()) as there:
        yield there


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("out", "tier", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path / "out"


def upload(bucket: Bucket, root: Path, prefix: str = "p/out/") -> None:
    for name, data in files(root).items():
        bucket.objects[prefix + name] = data


def listed(bucket: Bucket, name: str, tmp_path: Path) -> Listing:
    """What an import of this name lists."""

    async def main() -> Listing:
        place, named = split_url(parse_url(bucket.url(name)))
        store = open_foreign(place)
        try:
            return await (await BucketImportSource.at("shown", store, named, tmp_path / "objects")).listing()
        finally:
            await store.aclose()

    return asyncio.run(main())


def upload_steps(bucket: Bucket, root: Path, *steps: int) -> None:
    for step in steps:
        checkpoint(root, step, 1_800_000_000 + step)
    upload(bucket, root)


def imported(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], *more: str, code: int = 0):  # type: ignore[no-untyped-def]
    capsys.readouterr()
    to = str(tmp_path / "tier")
    assert run(["import", url, "--run", RUN, "--to", to, *more, "--json"]) == code, capsys.readouterr().err
    assert not list((tmp_path / "temporary").iterdir()), "something was left where temporary files go"
    return json.loads(capsys.readouterr().out)["imported"]


@pytest.mark.parametrize("writer", WRITERS, ids=[writer.__name__ for writer in WRITERS])
def test_every_layout_is_imported_and_put_back_in_place(
    writer: Callable[[Path], Path], bucket: Bucket, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program, step = WRITERS[writer]
    writer(root)
    upload(bucket, root)
    more = () if step is not None else ("--step", "7")
    (unit,) = imported(bucket.url("p/out"), tmp_path, capsys, *more)["units"]
    assert (unit["program"], unit["step"], unit["was_there"]) == (program, 7 if step is None else step, False)
    assert not bucket.asked["PutObject"] and not bucket.asked["DeleteObject"]
    bucket.asked.clear()
    (again,) = imported(bucket.url("p/out"), tmp_path, capsys, *more)["units"]
    assert again == {**unit, "sent": 0, "was_there": True}
    assert run(["verify", str(tmp_path / "tier")]) == 0
    check_put_back(root, tmp_path, unit["path"])


def test_url_names_the_same_checkpoints_as_a_path(
    bucket: Bucket, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of several, whose name another one's begins with; and one file, beside others and prefixes."""
    for step in (50, 500):
        checkpoint(root, step, 1_800_000_000 + step)
    layouts.tensors(root / "final.safetensors")
    layouts.text(root / "notes" / "a", "b")
    upload(bucket, root)
    found = imported(bucket.url("p/out/checkpoint-50"), tmp_path, capsys)
    assert [(one["path"], one["step"]) for one in found["units"]] == [("checkpoint-50", 50)] and not found["refused"]
    found = imported(bucket.url("p/out/final.safetensors"), tmp_path, capsys, "--step", "600")
    assert [(one["path"], one["step"]) for one in found["units"]] == [("final.safetensors", 600)]
    found = imported(bucket.url("p/out"), tmp_path, capsys, code=4)
    assert [(one["step"], one["was_there"]) for one in found["units"]] == [(50, True), (500, False)]
    assert [(one["path"], one["status"]) for one in found["refused"]] == [("final.safetensors", "stepless")]
    assert run(["import", bucket.url("p/nothing"), "--run", RUN, "--to", str(tmp_path / "tier")]) == 4
    assert "no object lies there" in capsys.readouterr().err


def test_googles_and_azures_names_are_read_as_they_are(
    tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`.metadata` and `=` stand in names of other programs; neither may be in a key of tierd's."""
    account = {"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
    layouts.torchtitan(root)
    with serving(Bucket()) as bucket:
        (tmp_path / "account.json").write_text(
            json.dumps({**account, "gcs_base_url": f"http://127.0.0.1:{bucket.port}"})
        )
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "account.json"))
        upload(bucket, root)
        assert any(name.endswith("/.metadata") for name in bucket.objects)
        (unit,) = imported(f"gs://bucket/p/out?endpoint=http://127.0.0.1:{bucket.port}", tmp_path, capsys)["units"]
    assert unit["program"] == "torchtitan" and run(["verify", str(tmp_path / "tier")]) == 0


def test_a_checkpoint_is_brought_in_bounded_pieces_of_one_object(
    bucket: Bucket, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint(root, 500, 1_800_000_000)
    torch.save({"x": torch.rand(5_000_000)}, root / "checkpoint-500" / "optimizer.pt")
    upload(bucket, root)
    assert imported(bucket.url("p/out"), tmp_path, capsys)["units"]
    asked = [head for head in bucket.heads if "Range: " in head]
    ranges = [re.search(r"Range: bytes=(\d+)-(\d+)", head) for head in asked]
    assert max(int(last) - int(first) for first, last in (found.groups() for found in ranges if found)) < 8 << 20
    assert len(asked) >= len(bucket.objects) + 2, "one of 20 MB is fetched in three pieces"
    assert all("If-Match: " in head for head in asked)
    assert run(["verify", str(tmp_path / "tier")]) == 0


def test_damaged_or_incomplete_checkpoint_of_a_bucket_is_named_and_left_out(
    bucket: Bucket, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    upload_steps(bucket, root, 500, 1000, 1500)
    del bucket.objects["p/out/checkpoint-500/trainer_state.json"]
    spoiled = bytearray(bucket.objects["p/out/checkpoint-1500/optimizer.pt"])
    spoiled[len(spoiled) // 2] ^= 1
    bucket.objects["p/out/checkpoint-1500/optimizer.pt"] = bytes(spoiled)
    found = imported(bucket.url("p/out"), tmp_path, capsys, code=5)
    assert [one["step"] for one in found["units"]] == [1000]
    assert [(one["path"], one["status"]) for one in found["refused"]] == [
        ("checkpoint-500", "incomplete"),
        ("checkpoint-1500", "damaged"),
    ]


def meddle(
    monkeypatch: pytest.MonkeyPatch, before: Callable[[], None] = lambda: None, after: Callable[[], None] = lambda: None
) -> None:
    """Change the bucket just before, or just after, a checkpoint's objects are downloaded."""
    download = BucketImportSource._download

    async def meddling(self, found):  # type: ignore[no-untyped-def]
        before()
        await download(self, found)
        after()

    monkeypatch.setattr(BucketImportSource, "_download", meddling)


@pytest.mark.parametrize("when", ["before", "after"])
def test_object_that_is_replaced_while_it_is_fetched_is_left_out(
    when: str, bucket: Bucket, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:  # type: ignore[no-untyped-def]
    checkpoint(root, 500, 1_800_000_000)
    upload(bucket, root)

    def replaced() -> None:
        bucket.objects["p/out/checkpoint-500/optimizer.pt"] = bucket.objects["p/out/checkpoint-500/scheduler.pt"]

    meddle(monkeypatch, **{when: replaced})
    found = imported(bucket.url("p/out"), tmp_path, capsys, code=4)
    assert not found["units"] and [one["status"] for one in found["refused"]] == ["changing"]


@pytest.mark.parametrize("name", ["extra.bin", "rng_state_1.pth"])
def test_object_that_is_put_into_a_checkpoint_meanwhile_is_noticed(
    name: str, bucket: Bucket, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:  # type: ignore[no-untyped-def]
    upload_steps(bucket, root, 500, 600)
    meddle(monkeypatch, after=lambda: bucket.objects.update({f"p/out/checkpoint-500/{name}": b"more"}))
    found = imported(bucket.url("p/out"), tmp_path, capsys, code=4)
    assert [(one["path"], one["status"]) for one in found["refused"]] == [("checkpoint-500", "changing")]
    assert [one["path"] for one in found["units"]] == ["checkpoint-600"]


def test_an_import_lists_the_place_once_and_then_each_checkpoint_alone(
    bucket: Bucket, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It listed every object after each checkpoint: a bucket of 1,000 checkpoints of 1,000 objects a million times."""
    upload_steps(bucket, root, 500, 600, 700)
    for at in range(2500):
        bucket.objects[f"p/out/logs/{at:04}"] = b""
    assert len(imported(bucket.url("p/out"), tmp_path, capsys)["units"]) == 3
    place, each = 5, 1  # requests: whether the name is a prefix, four pages; a checkpoint's prefix
    markers = 4  # beside the place
    assert bucket.asked["ListBucket"] <= place + 3 * each + markers


def test_a_checkpoint_without_room_is_not_begun(
    bucket: Bucket, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint(root, 500, 1_800_000_000)
    upload(bucket, root)
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(origins.shutil, "disk_usage", lambda path: full)
    assert run(["import", bucket.url("p/out"), "--run", RUN, "--to", str(tmp_path / "tier")]) != 0
    assert "set TMPDIR" in " ".join(capsys.readouterr().err.split())
    assert not list((tmp_path / "temporary").iterdir())


def test_requests_that_are_refused_for_now_are_sent_again(
    bucket: Bucket, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint(root, 500, 1_800_000_000)
    upload(bucket, root)
    seen = set[str]()

    def once(headers) -> str | None:  # type: ignore[no-untyped-def]
        extent = headers.get("Range", "")
        if not extent or extent in seen:
            return None
        seen.add(extent)
        return "SlowDown"

    bucket.refuse, bucket.refusal = once, (503, "SlowDown")
    assert imported(bucket.url("p/out"), tmp_path, capsys)["units"] and seen


HOSTILE = ("../../../escaped", "a//b", "/absolute", "x" * 300, "..", "new\nline", "a\0b", "\udce9")


@pytest.mark.parametrize("name", HOSTILE, ids=[ascii(name)[:20] for name in HOSTILE])
def test_a_name_that_cannot_be_a_files_is_never_a_path(name: str) -> None:
    inside = f"checkpoint-500/{name}"
    entries = bucket_entries({inside: ObjectInfo(inside, 3, "t"), "checkpoint-500/.metadata": ObjectInfo("m", 3, "t")})
    (strange,) = (path for path, entry in entries.items() if entry.kind == "other")
    assert strange.startswith("checkpoint-500/") and strange.isprintable()
    assert all(step not in ("", ".", "..") and len(step) < 256 for path in entries for step in path.split("/"))
    (unit,) = units(Listing(entries))
    assert unit.special_files == (strange,)


def test_a_checkpoint_with_such_a_name_is_not_imported_without_it(
    bucket: Bucket, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    upload_steps(bucket, root, 500, 1000, 1500)
    bucket.objects["p/out/checkpoint-500/../../../escaped"] = b"x"
    bucket.objects["p/out/checkpoint-1000/optimizer.pt/inside"] = b"x"  # an object that is a directory, too
    bucket.objects["p/out/checkpoint-1500/"] = b""  # as consoles make directories
    found = imported(bucket.url("p/out"), tmp_path, capsys, code=4)
    assert [one["step"] for one in found["units"]] == [1500]
    assert [(one["path"], one["status"]) for one in found["refused"]] == [
        ("checkpoint-500", "unknown"),
        ("checkpoint-1000", "unknown"),
    ]
    assert all("cannot be a file's" in one["reason"] for one in found["refused"])
    assert not list(tmp_path.rglob("escaped"))


def test_a_bucket_with_more_objects_than_a_listing_holds_is_refused(
    bucket: Bucket, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(origins, "MAX_NAMES", 10)
    for at in range(11):
        bucket.objects[f"p/out/{at:02}"] = b""
    assert run(["import", bucket.url("p/out"), "--run", RUN, "--to", str(tmp_path / "tier")]) == 3
    assert "more than 10 objects" in capsys.readouterr().err


def test_only_the_objects_beside_a_file_are_listed(bucket: Bucket, tmp_path: Path) -> None:
    """A prefix with any number of objects costs one request."""
    for at in range(3000):
        bucket.objects[f"p/deep/{at:04}"] = b""
    bucket.objects["p/deep.pt"] = bucket.objects["p/z.pt"] = b"x"

    assert list(listed(bucket, "p/z.pt", tmp_path).entries) == ["deep.pt", "z.pt"]
    assert bucket.asked["ListBucket"] <= 5


@pytest.mark.parametrize("name", ["a.ckpt", "a-EMA", "a-EMA.ckpt", "a"])
def test_marker_of_an_unfinished_checkpoint_is_listed_beside_each_name_that_it_marks(
    bucket: Bucket, tmp_path: Path, name: str
) -> None:
    bucket.objects[f"p/{name}/.metadata"] = bucket.objects["p/a-unfinished"] = b"x"
    assert "a-unfinished" in listed(bucket, f"p/{name}", tmp_path).entries
