"""The main job with its tier on a real S3 server: kill, corrupt both copies, resume, and compare bit for bit.

The same run as `make demo`, by the same trainer; only the tier is another. Then the node is lost: the spool is deleted,
and a trainer started with `to=` restores from S3 alone.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tierd
from examples.demo import compare, damage
from examples.demo.processes import started, wait_until
from tierd.core.errors import DaemonUnavailable
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest_codec import decode
from tierd.core.urls import parse_url
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.ipc.messages import ReportRequest, StatusRequest, Wait
from tierd.spool.spool import Spool
from tierd.stores.open import open_store

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

STEPS, EVERY, KILL_AT = 40, 5, 23
SIZES = ["--steps", str(STEPS), "--every", str(EVERY), "--epoch-steps", "15", "--width", "64", "--depth", "2"]
PATIENCE = 100.0


@pytest.fixture
def tier(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a fresh bucket."""
    endpoint = os.environ["TIERD_TEST_S3_ENDPOINT"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", os.environ["TIERD_TEST_S3_ACCESS_KEY"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", os.environ["TIERD_TEST_S3_SECRET_KEY"])
    bucket = f"tierd-{uuid.uuid4().hex[:12]}"
    asyncio.run(_bucket(endpoint, bucket))
    yield f"s3://{bucket}/some/prefix?endpoint={endpoint}&addressing=path&region=us-east-1"


async def _bucket(endpoint: str, name: str) -> None:
    from aiobotocore.session import get_session

    async with get_session().create_client("s3", endpoint_url=endpoint, region_name="us-east-1") as client:
        await client.create_bucket(Bucket=name)


def flip_on_s3(url: str, part: PartId) -> None:
    """One flipped bit in the chunk that holds the middle of the part's tensor file, put back under the same key."""

    async def flip() -> None:
        store = open_store(parse_url(url))
        try:
            manifest = decode(bytes(await store.get(part.manifest_key)), part)
            file = next(file for file in manifest.files if file.path == damage.TENSORS)
            ends = itertools.accumulate(chunk.size for chunk in file.chunks)
            both = zip(file.chunks, ends, strict=True)
            stored = next(chunk for chunk, end in both if end > file.size // 2).stored
            assert stored is not None
            key = f"{part.checkpoint.run}/{stored.key}"
            data = bytearray(await store.get(key))
            data[len(data) // 2] ^= 0x10
            await store.put(key, data)
        finally:
            await store.aclose()

    asyncio.run(flip())


def trainer(home: Path, name: str, *more: str) -> list[str]:
    log = str(home / f"{name}.jsonl")
    return ["--spool", str(home / "spool"), "--run", "job", "--log", log, *SIZES, *more]


def ask(home: Path, request: Any) -> dict[str, Any]:
    with DaemonConnection(Spool(home / "spool")) as link:
        return link.ask(request, PATIENCE)


def answers(home: Path) -> bool:
    try:
        return bool(ask(home, StatusRequest()))
    except DaemonUnavailable:
        return False


def test_kill_corrupt_resume_and_node_loss(tmp_path: Path, tier: str) -> None:
    home, logs = tmp_path, tmp_path / "logs"
    logs.mkdir()
    (home / "alone").mkdir()
    with started("reference", logs, "examples.demo.train", *trainer(home / "alone", "reference", "--alone")) as child:
        child.end(PATIENCE)
    reference = compare.read("reference", home / "alone" / "reference.jsonl")
    assert reference.last == STEPS

    with started("daemon", logs, "tierd", "run", "--spool", str(home / "spool"), "--to", tier) as daemon:
        wait_until("the daemon answers", lambda: answers(home), PATIENCE, daemon)
        with started("killed", logs, "examples.demo.train", *trainer(home, "killed")) as child:
            log = home / "killed.jsonl"
            wait_until("it is time", lambda: compare.read("killed", log).last >= KILL_AT, PATIENCE, child, daemon)
            child.kill()
        newest = next(one for one in ask(home, ReportRequest(run="job"))["report"]["checkpoints"] if one["complete"])
        victim = CheckpointId("job", newest["attempt"], newest["step"])
        part = PartId(victim, 0, 1)
        ask(home, Wait(part=part, tier="s3", timeout_s=PATIENCE))
        damage.flip_bit(damage.in_spool(home / "spool", "job", victim.name))
        flip_on_s3(tier, part)
        daemon.terminate(PATIENCE)  # the killed trainer's memory, which it kept, goes with it

    with started("daemon-2", logs, "tierd", "run", "--spool", str(home / "spool"), "--to", tier) as daemon:
        wait_until("the daemon answers", lambda: answers(home), PATIENCE, daemon)
        with started("resumed", logs, "examples.demo.train", *trainer(home, "resumed")) as child:
            child.end(PATIENCE, daemon)
        killed, resumed = (compare.read(name, home / f"{name}.jsonl") for name in ("killed", "resumed"))
        assert resumed.resumed is not None
        assert resumed.resumed["step"] == victim.step - EVERY
        assert [one["step"] for one in resumed.skipped] == [victim.step]
        assert "differ from their digest" in resumed.skipped[0]["reason"]
        assert compare.difference(reference, [killed, resumed]) is None
        daemon.terminate(PATIENCE)

    shutil.rmtree(home / "spool")  # the node is lost; the new one has the same command and an empty disk
    with tierd.Checkpointer(home / "spool", run="job", to=[tier]) as ckpt:
        found = ckpt.restore()
        assert found is not None
        assert (found.step, found.tier) == (STEPS, "s3")
        assert not found.skipped
