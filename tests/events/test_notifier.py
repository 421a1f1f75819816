"""Telling: real receivers hear what happens, and none of them, however it behaves, holds up the daemon."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from support.doubles import Double, is_chunk
from support.receiver import Receiver, receiving, wait_gone
from support.waiting import until
from support.world import commit, config, hurry, part, running, settle

from tierd.core.config import NotifyConfig
from tierd.core.errors import ConfigError, StoreRefused, StoreUnavailable
from tierd.daemon.daemon_status import make_status
from tierd.daemon.reconciler import Reconciler
from tierd.events.notifier import Notifier
from tierd.spool.commit import CommittedPart
from tierd.spool.spool import Spool
from tierd.stores.base import Store
from tierd.stores.memory_store import MemoryStore

SECRET = "c4nary-0f-a-hook"
PATIENT = 60.0  # seconds


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):  # which is not asked for what is on this machine
        monkeypatch.setenv(name, "http://127.0.0.1:9")


@contextlib.asynccontextmanager
async def notifying(
    spool: Spool, stores: dict[str, Store], *hooks: NotifyConfig, end_s: float = 5.0
) -> AsyncIterator[tuple[Reconciler, Notifier]]:
    """A daemon at work that tells."""
    notifier = Notifier(hooks, str(spool.root), again_s=0.01, end_s=end_s)
    daemon = Reconciler(config(spool, *stores), spool, stores, notifier.offer)
    notifier.start(daemon.journal)
    try:
        async with running(daemon):
            await settle(daemon)  # it has looked: what comes now is news
            yield daemon, notifier
    finally:
        await notifier.close()
        assert not any(channel.alive for channel in notifier._channels)


def hook(receiver: Receiver, **options: object) -> NotifyConfig:
    return NotifyConfig(url=receiver.url(f"/{SECRET}"), **options)


def script(tmp_path: Path, text: str, **options: object) -> NotifyConfig:
    """A command: a Python program with `tmp_path` as its argument."""
    (tmp_path / "told.py").write_text(text)
    return NotifyConfig(command=(sys.executable, "-I", "-S", str(tmp_path / "told.py"), str(tmp_path)), **options)


def test_a_webhook_hears_of_a_save_and_of_its_being_durable(spool, monkeypatch):
    monkeypatch.setenv("HOOK_TOKEN", f"Bearer {SECRET}")

    async def work():
        with receiving() as receiver:
            one = hook(receiver, headers={"Authorization": "env:HOOK_TOKEN"})
            async with notifying(spool, {"first": MemoryStore(), "second": MemoryStore()}, one) as (daemon, _):
                for rank in (0, 1):
                    commit(spool, part(7, rank=rank, world=2))
                await settle(daemon)
                await until(lambda: len(receiver.reported) == 4)
                assert sorted(receiver.what()) == ["durable", "durable", "persisted", "persisted"]
                durable = next(one for one in receiver.reported if one["what"] == "durable")
                size = 2 * daemon.inventory().spool.facts(part(7, rank=0, world=2)).size
                assert {
                    name: durable[name] for name in ("run", "step", "world_size", "raw_bytes", "level", "spool")
                } == {
                    "run": "run",
                    "step": 7,
                    "world_size": 2,
                    "raw_bytes": size,
                    "level": "info",
                    "spool": str(spool.root),
                }
                assert {"rank", "tries", "counts"} & set(durable) == set() and durable["stored_bytes"] > 0
                assert sorted(one["place"] for one in receiver.reported if one["what"] == "durable") == [
                    "first",
                    "second",
                ]
                assert sorted(one["rank"] for one in receiver.reported if one["what"] == "persisted") == [0, 1]
                assert len({one["id"] for one in receiver.reported}) == 4
                path, headers = receiver.asked[0]
                assert path == f"/{SECRET}" and headers["Authorization"] == f"Bearer {SECRET}"
                assert headers["Content-Type"] == "application/json"
                await settle(daemon)
                assert len(receiver.reported) == 4

    asyncio.run(work())


def test_events_of_saves_and_flushes_carry_metrics(spool):
    """RemoteMonitor's purpose: what is no finite number is null, and a save without metrics has no member."""

    async def work():
        with receiving() as receiver:
            one = hook(receiver, events=("persisted", "flushed", "durable"))
            async with notifying(spool, {"tier": MemoryStore()}, one) as (daemon, _):
                commit(spool, part(7), metrics={"loss": 0.25, "bad": "nan"})
                daemon.note_commit(part(8), CommittedPart(3, direct=True, recycled=False, metrics={"loss": 0.125}))
                await settle(daemon)
                await until(lambda: len(receiver.reported) == 4)
                reported = {(one["what"], one["step"]): one.get("metrics") for one in receiver.reported}
                assert reported.pop(("persisted", 8)) == {"loss": 0.125}
                assert reported == {
                    (what, 7): {"bad": None, "loss": 0.25} for what in ("persisted", "flushed", "durable")
                }

    asyncio.run(work())


def test_daemon_that_starts_notifies_of_no_earlier_state(spool):
    async def work():
        store = MemoryStore()
        commit(spool, part(1))
        with receiving() as receiver:
            async with notifying(spool, {"tier": store}, hook(receiver)) as (daemon, _):
                await until(lambda: receiver.what() == ["durable"])  # that became so under its eyes
            async with notifying(spool, {"tier": store}, hook(receiver)) as (daemon, _):
                commit(spool, part(2))
                await settle(daemon)
                await until(lambda: len(receiver.reported) == 3)
                assert {one["step"] for one in receiver.reported[1:]} == {2}

    asyncio.run(work())


@pytest.mark.parametrize("answer", ["hang", "drip"])
def test_flushes_continue_while_a_receiver_hangs(spool, answer):
    """Everything is flushed while the first event has not been taken yet."""

    async def work():
        store = MemoryStore()
        with receiving() as receiver:
            receiver.answer = answer
            async with notifying(spool, {"tier": store}, hook(receiver, timeout_s=600.0)) as (daemon, notifier):
                for step in range(25):
                    commit(spool, part(step))
                await settle(daemon, PATIENT)
                assert daemon.journal.counters["flushed"] == 25 and not daemon.backlog.parts()
                await until(lambda: receiver.asked)
                (one,) = notifier.status()
                assert one.delivered == one.failures == 0 and one.held == 20 and one.queued == 29
                assert len(receiver.asked) == 1
                receiver.release.set()

    asyncio.run(work())


@pytest.mark.parametrize("answer", [500, "drip", "hang", "garbage", "close", 302, 404, "refused"])
def test_a_receiver_that_fails_is_an_alert_until_it_works(spool, answer, caplog):
    """Told through the other one, and where people look; afterwards it hears how much it has missed."""

    async def work():
        with receiving() as bad, receiving() as good:
            one = hook(bad, timeout_s=0.3 if answer in ("drip", "hang") else 10.0, per_minute=1000)
            async with notifying(spool, {"tier": MemoryStore()}, one, hook(good)) as (daemon, notifier):
                port = bad.port
                bad.answer = answer
                if answer == "refused":
                    bad.stop()
                for step in (1, 2, 3):
                    commit(spool, part(step))
                await settle(daemon, PATIENT)
                await until(lambda: "failing" in good.what())
                alert = next(one for one in good.reported if one["what"] == "failing")
                assert (alert["place"], alert["doing"], alert["level"]) == ("notify[0]", "notify", "alert")
                assert alert["tries"] == 3 and alert["subject"] == f"http://127.0.0.1:{port}/…"
                assert [(one.place, one.doing) for one in daemon.journal.alerts()] == [("notify[0]", "notify")]
                await until(lambda: notifier.status()[0].dropped == 6)
                first, second = notifier.status()
                asked = 6 if answer in (302, 404) else 8  # three times once, and then each once
                assert first.failures == asked and first.last_error and not second.last_error
                if answer in ("drip", "hang"):  # on a busy machine time may be up before all was sent
                    assert 1 <= len(bad.asked) <= asked
                else:
                    assert len(bad.asked) == (0 if answer == "refused" else asked)
                assert not bad.reported
                if answer == "drip":
                    await until(lambda: len(bad.gone) == len(bad.asked))
                bad.answer = 200
                if answer == "refused":
                    bad.start()
                commit(spool, part(4))
                await settle(daemon)
                await until(lambda: "works again" in good.what())
                assert daemon.journal.alerts() == () and daemon.journal.counters["alerts"] == 1
                await until(lambda: "works again" in bad.what() and "durable" in bad.what())
            assert bad.reported[-1]["what"] == "more"  # at the latest when the daemon ends
            assert bad.reported[-1]["counts"] == {"persisted": 3, "durable": 3}
            said = msgspec.json.encode([notifier.status(), list(daemon.journal.events), good.reported]).decode()
            assert SECRET not in said and "elsewhere" not in str(bad.asked)

    with caplog.at_level(logging.DEBUG):
        asyncio.run(work())
    assert SECRET not in caplog.text
    critical = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert [record.args[1] for record in critical] == ["failing"]


def test_events_beyond_the_rate_arrive_as_a_summary(spool):
    async def work():
        with receiving() as receiver:
            async with notifying(spool, {"tier": MemoryStore()}, hook(receiver, per_minute=2)) as (daemon, notifier):
                for step in range(5):
                    commit(spool, part(step))
                await settle(daemon)
                await until(lambda: notifier.status()[0].held == 8 and len(receiver.reported) == 2)
            (more,) = receiver.reported[2:]
            assert more["subject"] == "8 more" and sum(more["counts"].values()) == 8

    asyncio.run(work())


# -- commands ---------------------------------------------------------------------------------------------------------

NOTE = """
import json, os, sys
event = json.load(sys.stdin)
with open(sys.argv[1] + "/told", "a") as file:
    file.write(json.dumps([event, dict(os.environ), os.getcwd(), os.nice(0)]) + "\\n")
"""


def test_a_command_gets_an_event_on_its_standard_input_and_nothing_else(spool, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)

    async def work():
        one = script(tmp_path, NOTE, events=("durable",))
        async with notifying(spool, {"tier": MemoryStore()}, one) as (daemon, notifier):
            commit(spool, part(3))
            await settle(daemon)
            await until(lambda: notifier.status()[0].delivered == 1)
        (line,) = (tmp_path / "told").read_text().splitlines()
        event, environment, where, nice = json.loads(line)
        assert (event["what"], event["step"], event["place"]) == ("durable", 3, "tier")
        assert set(environment) - {"LC_CTYPE"} == {"PATH", "LANG"} and where == "/" and nice == 19

    asyncio.run(work())


HANG = """
import os, sys, time, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for _ in range(2):
    os.fork()
with open(sys.argv[1] + "/pids", "a") as file:
    file.write(f"{os.getpid()}\\n")
time.sleep(1000)
"""
LEAVE = HANG.replace("time.sleep(1000)", "os.getpid() != os.getpgid(0) and time.sleep(1000); time.sleep(0.5)")


@pytest.mark.parametrize("text", [HANG, LEAVE], ids=["hangs", "leaves others behind"])
def test_no_process_of_a_command_outlives_its_time(spool, tmp_path, text):
    def pids() -> list[int]:
        path = tmp_path / "pids"
        return [int(line) for line in path.read_text().splitlines()] if path.exists() else []

    async def work():
        one = script(tmp_path, text, events=("persisted",), timeout_s=20.0 if text is LEAVE else 3.0)
        async with notifying(spool, {"tier": MemoryStore()}, one) as (daemon, notifier):
            commit(spool, part(3))
            daemon.wake()
            await until(lambda: notifier.status()[0].delivered + notifier.status()[0].dropped)
            (found,) = notifier.status()
            assert found.last_error == (None if text is LEAVE else "it ran longer than 3 s")
        assert len(pids()) >= 4  # and once more to tell how much was not told
        wait_gone(pids())

    asyncio.run(work())


def test_end_of_the_daemon_gives_queued_events_a_short_time(spool, tmp_path):
    """A receiver that answers gets all of it; what hangs is cut off, a command with all that it started."""

    async def work():
        with receiving() as fine, receiving() as hung:
            hung.answer = "hang"
            one = script(tmp_path, HANG, timeout_s=600.0)
            hooks = hook(fine), hook(hung, timeout_s=600.0), one
            async with notifying(spool, {"tier": MemoryStore()}, *hooks, end_s=1.0) as (daemon, _):
                commit(spool, part(1))
                await settle(daemon)
                await until(lambda: (tmp_path / "pids").exists() and hung.asked)
                await until(lambda: (tmp_path / "pids").read_text().count("\n") == 4)
            assert sorted(fine.what()) == ["durable", "persisted"]
            assert daemon.journal.alerts() == () and len(hung.asked) == 1
        wait_gone([int(line) for line in (tmp_path / "pids").read_text().splitlines()])

    asyncio.run(work())


def test_a_command_that_fails_three_times_is_an_alert(spool, tmp_path):
    async def work():
        bad = script(tmp_path, "import sys; sys.exit(3)", events=("persisted",))
        lost = NotifyConfig(command=("/nowhere/at/all",), events=("persisted",))
        async with notifying(spool, {"tier": MemoryStore()}, bad, lost) as (daemon, notifier):
            for step in (1, 2, 3):
                commit(spool, part(step))
            await settle(daemon)
            await until(lambda: len(daemon.journal.alerts()) == 2)
            whys = [one.last_error for one in notifier.status()]
            assert whys == ["it ended with 3", "it cannot be run: No such file or directory"]
            assert {one.subject for one in daemon.journal.alerts()} == {sys.executable, "/nowhere/at/all"}

    asyncio.run(work())


# -- what the daemon finds failing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [StoreUnavailable("timeout"), StoreRefused("403")], ids=["unavailable", "refused"])
@pytest.mark.parametrize("all_of_it", [True, False], ids=["the tier", "what is put there"])
def test_a_tier_that_fails_three_times_in_a_row_is_an_alert_until_it_works(spool, monkeypatch, error, all_of_it):
    hurry(monkeypatch)

    def refuse(operation: str, key: str) -> None:
        if operation == "put" and is_chunk(key):
            raise error

    async def work():
        store = Double()
        with receiving() as receiver:
            one = hook(receiver, events=("failing", "works again"))
            async with notifying(spool, {"tier": store, "other": MemoryStore()}, one) as (daemon, notifier):
                if all_of_it:
                    store.error = error
                else:
                    store.before = refuse
                commit(spool, part(1))
                daemon.wake()
                await until(lambda: receiver.reported)
                (alert,) = receiver.reported
                assert (alert["what"], alert["place"], alert["tries"]) == ("failing", "tier", 3)
                assert alert["doing"] == ("observe" if all_of_it else "flush") and str(error) in alert["why"]
                assert alert.get("step") == (None if all_of_it else 1) and alert["seconds"] >= 0
                await until(lambda: daemon.journal.counters["errors"] > 6)
                found = make_status(daemon, 0, 0, notifier.status())
                assert [one.place for one in found.alerts] == ["tier"] and found.counters["alerts"] == 1
                store.error = store.before = None
                await settle(daemon, PATIENT)
                await until(lambda: len(receiver.reported) == 2)
                assert receiver.reported[1]["what"] == "works again" and receiver.reported[1]["tries"] > 3
                assert not daemon.journal.alerts()

    asyncio.run(work())


def test_saves_that_fail_three_times_in_a_row_are_an_alert_and_a_later_launch_ends_it(spool):
    async def work():
        async with notifying(spool, {"tier": MemoryStore()}) as (daemon, _):
            for step in (1, 2, 3):
                daemon.note_commit(part(step), StoreUnavailable("no room"))
                daemon.save_events.record_given_up(part(step), "as its trainer says, too")
            kinds = [event.what for event in daemon.journal.events]
            assert kinds == ["persist failed", "persist failed", "persist failed", "failing"]
            daemon.save_events.record_given_up(part(3), "the same step, tried again, by its trainer")
            assert daemon.journal.counters["persist_failures"] == 4 and len(daemon.journal.alerts()) == 1
            commit(spool, part(1, launch=2, rank=1, world=2))
            await settle(daemon)
            assert not daemon.journal.alerts() and "works again" in [event.what for event in daemon.journal.events]

    asyncio.run(work())


# -- what is referred to ----------------------------------------------------------------------------------------------


def test_referenced_secret_is_read_at_the_start(tmp_path, monkeypatch):
    good, bad = tmp_path / "good", tmp_path / "bad"
    for path, mode in ((good, 0o600), (bad, 0o644)):
        path.write_text(f"https://hooks.example/{SECRET}\n")
        path.chmod(mode)
    monkeypatch.setenv("HOOK", f"http://127.0.0.1:80/{SECRET}")
    monkeypatch.setenv("PLAIN", f"http://hooks.example/{SECRET}")
    monkeypatch.setenv("EMPTY", "")
    hooks = NotifyConfig(url=f"file:{good}"), NotifyConfig(url="env:HOOK")
    assert [one.to for one in Notifier(hooks).status()] == ["https://hooks.example/…", "http://127.0.0.1:80/…"]
    for url, why in (
        (f"file:{bad}", "opens it to others"),
        (f"file:{tmp_path}/none", "No such file"),
        ("env:PLAIN", "http:// goes to this machine alone"),
        ("env:EMPTY", "holds nothing"),
        ("env:NEVER_SET", "env:NEVER_SET holds nothing"),
    ):
        with pytest.raises(ConfigError, match=why) as caught:
            Notifier([*hooks, NotifyConfig(url=url)])
        assert str(caught.value).startswith("notify[2].url: ") and SECRET not in str(caught.value)
    with pytest.raises(ConfigError, match=r"notify\[0\].headers.X-Key: "):
        Notifier([NotifyConfig(url="https://host", headers={"X-Key": "env:NEVER_SET"})])
    assert os.environ["HOOK"]
