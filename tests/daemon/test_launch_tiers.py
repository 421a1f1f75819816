"""The tiers of a launch that finds the daemon of an earlier launch: that daemon takes them up beside its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
from support.doubles import Double
from support.timed import timed_client
from support.training import tensors
from support.waiting import until, wait_until
from support.world import Daemon, commit, part

import tierd
from tierd.core.config import from_urls, with_urls
from tierd.core.errors import DaemonUnavailable
from tierd.daemon import daemon_service
from tierd.ipc.daemon_connection import DaemonConnection, spool_holder_pid
from tierd.ipc.messages import Attach, StatusRequest
from tierd.spool.spool import Spool


@pytest.fixture(autouse=True)
def impatient(monkeypatch) -> None:
    timed_client(monkeypatch, hello_s=1.0, start_s=1.0)


def directory(path: Path) -> str:
    path.mkdir(exist_ok=True)
    return f"file://{path}"


@contextlib.asynccontextmanager
async def serving(spool: Spool, urls: list[str], *, by_trainer: bool = True) -> AsyncIterator[asyncio.Future]:
    config = msgspec.structs.replace(from_urls(str(spool.root), urls), drain="1s")
    daemon = asyncio.ensure_future(daemon_service.serve(config, until_idle=by_trainer, await_trainer=by_trainer))
    await until(spool.socket.exists)
    try:
        yield daemon
    finally:
        if not daemon.done():
            os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(60):
            await daemon


@contextlib.contextmanager
def attached(spool: Spool) -> DaemonConnection:
    link = DaemonConnection(spool)
    try:
        yield link
    finally:
        link.close()


async def attach(link: DaemonConnection, *to: str) -> dict:
    return await asyncio.to_thread(link.ask, Attach(run="run", to=to), 60.0)


def manifests(tier: Path) -> int:
    return len(list(tier.glob("run/manifests/*/*")))


@pytest.mark.parametrize("both", [False, True])
async def test_daemon_takes_tiers_of_new_launch_when_its_own_tier_is_gone(spool, tmp_path, both):
    a, b = tmp_path / "a", tmp_path / "b"
    async with serving(spool, [directory(a)]) as daemon:
        with attached(spool) as first:
            assert (await attach(first, directory(a)))["tiers"] == {"file": f"file://{a}"}
            shutil.rmtree(a)
            commit(spool, part(1))
        with attached(spool) as second:
            answer = await attach(second, *([f"file://{a}"] if both else []), directory(b))
            urls = {"file": f"file://{a}", "file-2": f"file://{b}"}
            assert answer["tiers"] == urls and "refused" not in answer
            assert list(answer["tiers"]) == (["file", "file-2"] if both else ["file-2", "file"])
            await until(lambda: manifests(b) == 1)
            assert spool.has(part(1)), "the tier that is gone still wants it"
        assert not daemon.done()


async def test_two_trainers_with_different_tiers_get_both(spool, tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    async with serving(spool, [directory(a)]):
        with attached(spool) as first, attached(spool) as second:
            await attach(first, directory(a))
            assert list((await attach(second, directory(b)))["tiers"]) == ["file", "file-2"]
            commit(spool, part(1))
            await until(lambda: manifests(a) == manifests(b) == 1)


async def test_configured_daemon_refuses_tiers_of_launch_with_way_out(spool, tmp_path):
    async with serving(spool, [directory(tmp_path / "a")], by_trainer=False):
        with attached(spool) as link:
            answer = await attach(link, directory(tmp_path / "b"))
            assert list(answer["tiers"]) == ["file"]
            assert "systemctl reload" in answer["refused"] and "leave `to` out" in answer["refused"]
        with attached(spool) as link:
            assert "refused" not in await attach(link, directory(tmp_path / "a"))


async def test_unusable_tiers_of_launch_change_nothing(spool, tmp_path):
    async with serving(spool, [directory(tmp_path / "a")]):
        with attached(spool) as link:
            answer = await attach(link, f"file://{spool.root}/inside")
            assert list(answer["tiers"]) == ["file"] and str(spool.root) in answer["refused"]
            commit(spool, part(1))
            await until(lambda: manifests(tmp_path / "a") == 1)
            status = (await asyncio.to_thread(link.ask, StatusRequest(), 60.0))["status"]
            assert [tier["name"] for tier in status["tiers"]] == ["file"]


def test_trainer_logs_refused_tiers_with_way_out(spool, tmp_path, caplog):
    caplog.set_level(logging.WARNING, "tierd")
    with Daemon(spool.root, {"tier": Double()}):
        tierd.Checkpointer(spool.root, "run", to=[directory(tmp_path / "b")]).close()
    assert "other tiers than `to` names" in caplog.text and "systemctl reload" in caplog.text


def _ended(spool: Spool) -> bool:
    try:
        DaemonConnection(spool).close()
    except DaemonUnavailable:
        return True
    return False


@contextlib.contextmanager
def stopped(spool: Spool, a: Path) -> Iterator[int]:
    """Stop the daemon that a launch with tier `a` started and that is kept alive by what `a`, now away, lacks."""
    with tierd.Checkpointer(spool.root, "run", to=[directory(a)]) as first:
        a.rename(a.with_name("away"))
        first.save(1, tensors(1)).wait()
    daemon = spool_holder_pid(spool)
    os.kill(daemon, signal.SIGSTOP)
    try:
        yield daemon
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(daemon, signal.SIGKILL)
        wait_until(lambda: _ended(spool))


@pytest.mark.parametrize("close", [False, True])
def test_daemon_that_was_stopped_takes_tiers_of_launch_without_another_save(spool, tmp_path, caplog, close):
    """docs/explanation/daemon.md, "The tiers of a new launch": the launch tells a woken daemon, at its close at the
    latest."""
    caplog.set_level(logging.WARNING, "tierd")
    b = tmp_path / "b"
    with stopped(spool, tmp_path / "a") as daemon:
        with tierd.Checkpointer(spool.root, "run", to=[directory(b)]) as second:
            assert f"kill -CONT {daemon}" in caplog.text
            second.save(2, tensors(2)).wait()
            time.sleep(2)  # the renewal that follows each save has found the daemon stopped
            os.kill(daemon, signal.SIGCONT)
            if not close:
                wait_until(lambda: manifests(b) == 2)
        wait_until(lambda: manifests(b) == 2)
        assert {part.checkpoint.step for part in spool.parts()} == {1, 2}, "the tier that is away still wants them"


def test_launch_that_ends_while_daemon_is_stopped_names_unflushed_saves_and_remedy(spool, tmp_path, caplog):
    b = tmp_path / "b"
    with stopped(spool, tmp_path / "a") as daemon:
        with tierd.Checkpointer(spool.root, "run", to=[directory(b)]) as second:
            second.save(2, tensors(2)).wait()
            caplog.clear()
            caplog.set_level(logging.WARNING, "tierd")
        assert "step 2" in caplog.text and f"kill -CONT {daemon}" in caplog.text and "kill -KILL" in caplog.text
        os.kill(daemon, signal.SIGCONT)
        with tierd.Checkpointer(spool.root, "run", to=[directory(b)]):
            wait_until(lambda: manifests(b) == 2)


def test_stopped_daemon_that_is_killed_gives_way_to_daemon_with_tiers_of_launch(spool, tmp_path):
    b = tmp_path / "b"
    with (
        stopped(spool, tmp_path / "a") as daemon,
        tierd.Checkpointer(spool.root, "run", to=[directory(b)]) as second,
    ):
        second.save(2, tensors(2)).wait()
        os.kill(daemon, signal.SIGKILL)
        wait_until(lambda: manifests(b) == 2)


def test_added_tiers_keep_names_of_those_that_are_there():
    config = from_urls("/spool", ["file:///a", "s3://bucket/c"])
    more = with_urls(config, ["file:///d", "s3://bucket/c"], first=True)
    assert [(tier.name, tier.url) for tier in more.tier] == [
        ("file-2", "file:///d"),
        ("s3", "s3://bucket/c"),
        ("file", "file:///a"),
    ]
    assert with_urls(more, ["file:///a"], first=False) is more
