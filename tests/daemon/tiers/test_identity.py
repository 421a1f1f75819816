"""Two names for one place: nothing is deleted by a policy that does not know the other one's."""

from __future__ import annotations

import asyncio
import json
import random
from collections import deque
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from stores.s3.test_s3_store import credentials
from support.doubles import Double, contents
from support.s3stub import Bucket, serving
from support.waiting import until
from support.world import commit, converge, part, running, settle, steps_on

import tierd
from tierd.cli import run as command
from tierd.cli.commands import prune_commands
from tierd.core.config import Config, TierConfig, from_urls
from tierd.core.errors import ConfigError, StoreRefused, StoreUnavailable
from tierd.core.ids import IDENTITY_KEY
from tierd.core.retention.policy import RetentionPolicy
from tierd.core.urls import parse_url
from tierd.daemon.reconciler import Reconciler
from tierd.daemon.tiers.tier_identity import check_identities, ensure_identity, put_identity, read_identity
from tierd.doctor.examination import ExaminationScope, examine
from tierd.doctor.tier_checks import ExaminedTier
from tierd.spool.spool import Spool
from tierd.stores.file_store import FileStore
from tierd.stores.memory_store import MemoryStore
from tierd.stores.open import open_tiers

__all__ = ["credentials"]  # the fixture


def named(spool: Spool, keeps: dict[str, int], urls: dict[str, str] | None = None) -> Config:
    """A configuration of tiers by name, each with its own `keep_last`."""
    urls = urls or {name: f"s3://bucket/p?endpoint=http://{name}" for name in keeps}
    tiers = [
        TierConfig(name=name, url=urls[name], retention=RetentionPolicy(keep_last=keep)) for name, keep in keeps.items()
    ]
    return Config(spool=str(spool.root), tier=tuple(tiers), min_free_percent=0.0, scrub="0s")


class Below(MemoryStore):
    """The objects of another store below a prefix."""

    def __init__(self, outer: MemoryStore, prefix: str) -> None:
        super().__init__()
        self._outer, self._prefix = outer, prefix

    async def put(self, key, data):
        return await self._outer.put(f"{self._prefix}/{key}", data)

    async def get(self, key, into=None):
        return await self._outer.get(f"{self._prefix}/{key}", into)


def test_a_tier_gets_a_record_with_its_first_object_and_keeps_it(spool):
    store = MemoryStore()
    commit(spool, part(1))
    asyncio.run(converge(spool, {"tier": store}))
    record = json.loads(asyncio.run(store.get("README.md.id")))
    assert record["format"] == 1 and len(record["id"]) == 32
    commit(spool, part(2))
    asyncio.run(converge(spool, {"tier": store}))
    assert asyncio.run(read_identity(store)) == record["id"]


@pytest.mark.parametrize("recorded", [True, False])
def test_two_names_of_one_place_are_refused_before_a_prune(spool, recorded):
    """Endpoints `localhost` and `127.0.0.1`, `keep_last` 1 and 8: [6] was left of [1..6]."""
    store = MemoryStore()
    if recorded:
        asyncio.run(put_identity(store))

    async def work() -> None:
        with pytest.raises(ConfigError, match="is the place of tier 'poor' under another name"):
            if not recorded:
                await ensure_identity(store)
            await check_identities(named(spool, {"poor": 1, "rich": 8}).urls(), {"poor": store, "rich": store}, "poor")

    asyncio.run(work())


def linked(tmp_path: Path, spool: Spool) -> tuple[Reconciler, Path]:
    """A daemon with the tiers `poor`, `keep_last` 2, and `rich`, `keep_last` 5, whose path is a link."""
    for name in ("poor", "disk"):
        (tmp_path / name).mkdir()
    point(link := tmp_path / "rich", tmp_path / "disk")
    urls = {name: str(tmp_path / name) for name in ("poor", "rich")}
    stores = {name: FileStore(tmp_path / name) for name in urls}
    return Reconciler(named(spool, {"poor": 2, "rich": 5}, urls), spool, stores), link


def point(link: Path, directory: Path) -> None:
    link.unlink(missing_ok=True)
    link.symlink_to(directory)


def steps_below(directory: Path) -> list[int]:
    return steps_on(str(path.relative_to(directory)) for path in directory.glob("*/manifests/*/*.json"))


async def test_tier_that_becomes_the_place_of_another_while_the_daemon_runs_is_not_pruned(tmp_path, spool):
    """A link that is set to another directory, as `mount --bind` does: [7, 8] was left of what `rich` wanted."""
    daemon, link = linked(tmp_path, spool)
    async with running(daemon):
        for step in range(1, 5):
            commit(spool, part(step))
            await settle(daemon)
        assert daemon.journal.counters["pruned"]  # so the tiers were found to be two places
        point(link, tmp_path / "poor")
        for step in range(5, 9):
            commit(spool, part(step))
        daemon.wake()
        await until(lambda: "under another name" in str(daemon.workers["poor"].last_error))
        await until(lambda: {5, 6, 7, 8} <= set(steps_below(tmp_path / "poor")))
        await until(lambda: "under another name" in str(daemon.workers["poor"].last_error))
    assert steps_below(tmp_path / "poor") == [3, 4, 5, 6, 7, 8]
    assert steps_below(tmp_path / "disk") == [1, 2, 3, 4]


async def test_prune_continues_once_the_tiers_are_two_places_again(tmp_path, spool):
    daemon, link = linked(tmp_path, spool)
    async with running(daemon):
        for step in range(1, 4):
            commit(spool, part(step))
            await settle(daemon)
        point(link, tmp_path / "poor")
        commit(spool, part(4))
        daemon.wake()
        await until(lambda: "under another name" in str(daemon.workers["poor"].last_error))
        point(link, tmp_path / "disk")
        await until(lambda: steps_below(tmp_path / "poor") == [3, 4])


def test_tier_is_not_pruned_while_a_tier_that_may_be_its_place_does_not_show_its_record(spool, caplog):
    caplog.set_level("INFO", "tierd.daemon")
    place, rich = MemoryStore(), Double()

    def mute(operation: str, key: str) -> None:
        if key == IDENTITY_KEY:
            raise StoreUnavailable("silent")

    async def work() -> None:
        daemon = Reconciler(named(spool, {"poor": 1, "rich": 3}), spool, {"poor": place, "rich": rich})
        async with running(daemon):
            for step in range(1, 4):
                commit(spool, part(step))
                await settle(daemon)
            caplog.clear()
            rich.inner, rich.before = place, mute
            for step in range(4, 7):
                commit(spool, part(step))
            daemon.wake()
            await until(lambda: {4, 5, 6} <= set(steps_on(place.objects)))
            await until(lambda: "poor: not pruned yet" in caplog.text)

    asyncio.run(work())
    assert {4, 5, 6} <= set(steps_on(place.objects))


def test_the_command_prune_compares_again_before_each_deletion(tmp_path, spool, monkeypatch):
    """`rich` becomes the place of `poor` after the command has decided what goes."""
    for name in ("poor", "disk"):
        (tmp_path / name).mkdir()
    point(link := tmp_path / "rich", tmp_path / "disk")
    file = tmp_path / "tierd.toml"
    tiers = [
        f'[[tier]]\nname = "{name}"\nurl = "{tmp_path / name}"\nretention = {{keep_last = {keep}}}\n'
        for name, keep in (("poor", 1), ("rich", 5))
    ]
    file.write_text(f'spool = "{spool.root}"\n' + "".join(tiers))
    for step in range(1, 4):
        commit(spool, part(step))
    asyncio.run(converge(spool, {name: FileStore(tmp_path / name) for name in ("poor", "rich")}))
    observe = prune_commands.observe_places

    async def observed(*places: object) -> object:
        try:
            return await observe(*places)
        finally:
            point(link, tmp_path / "poor")

    monkeypatch.setattr(prune_commands, "observe_places", observed)
    assert command(["prune", "--config", str(file)]) == 3
    assert steps_below(tmp_path / "poor") == [1, 2, 3]


@pytest.mark.parametrize("read_only", ["", "a", "b"])
def test_copied_tier_is_reported_as_a_copy_and_both_keep_their_wanted_checkpoints(spool, caplog, read_only):
    """`cp -a` of a tier, both named by one daemon; also if one is a backup that takes nothing."""
    store, copy = MemoryStore(), MemoryStore()
    for step in (1, 2, 3):
        commit(spool, part(step))
    asyncio.run(converge(spool, {"tier": store}, keep=8))

    class ReadOnly(Double):
        async def _enter(self, operation, key):
            if operation in ("put", "delete"):
                raise StoreRefused(f"{operation} {key}: read-only")

    async def work() -> None:
        for key, data in (await contents(store, policies=True)).items():
            await copy.put(key, data)
        both = {"a": store, "b": copy}
        stores = {name: ReadOnly(one) if name == read_only else one for name, one in both.items()}
        poor, rich = ("a", "b") if read_only == "b" else ("b", "a")
        daemon = Reconciler(named(spool, {poor: 1, rich: 8}), spool, stores)
        async with running(daemon):
            await until(lambda: steps_on(dict(both[poor].objects)) == [3])
        assert "copy of the other, as from a backup" in caplog.text
        assert steps_on(await contents(both[rich])) == [1, 2, 3]
        assert await read_identity(store) != await read_identity(copy)

    asyncio.run(work())


async def test_tier_below_another_tier_under_another_name_is_refused(spool):
    outer = MemoryStore()
    inner = Below(outer, "r")
    urls = {"outer": "s3://bucket/n?endpoint=http://a", "inner": "s3://bucket/n/r?endpoint=http://b"}
    await put_identity(inner)
    with pytest.raises(ConfigError, match="'inner' lies in the place of tier 'outer'"):
        await check_identities(named(spool, {"outer": 1, "inner": 8}, urls).urls(), {"outer": outer, "inner": inner})


def test_a_tier_that_does_not_answer_is_left_out_and_compared_later(spool):
    store = MemoryStore()
    asyncio.run(put_identity(store))

    class Silent(MemoryStore):
        async def get(self, key, into=None):
            raise StoreUnavailable("silent")

    async def work() -> None:
        assert await check_identities(named(spool, {"a": 1, "b": 8}).urls(), {"a": store, "b": Silent()}) == {"b"}

    asyncio.run(work())


class Turns:
    """Lets the requests of two processes happen in a random order."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.waiting: tuple[deque[asyncio.Future[None]], ...] = (deque(), deque())

    def store(self, inner: MemoryStore, process: int) -> Double:
        async def wait() -> None:
            turn = asyncio.get_running_loop().create_future()
            self.waiting[process].append(turn)
            await turn

        class Waiting(Double):
            async def _enter(self, operation: str, key: str) -> None:
                await wait()

        return Waiting(inner)

    async def play(self, *processes: Coroutine[None, None, frozenset[str]]) -> list[frozenset[str] | BaseException]:
        tasks = [asyncio.ensure_future(process) for process in processes]
        while not all(task.done() for task in tasks):
            for _ in range(10):
                await asyncio.sleep(0)
            if ready := [waiting for waiting in self.waiting if waiting]:
                self.chance.choice(ready).popleft().set_result(None)
        return await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("places", ["one", "two", "copied"])
def test_processes_that_compare_at_the_same_time_are_not_misled(spool, places):
    """Each may put the tier's first record between two reads of the other one, which then saw two records."""
    urls = named(spool, {"a": 1, "b": 8}).urls()

    async def work(seed: int) -> None:
        a = MemoryStore()
        b = a if places == "one" else MemoryStore()
        if places == "copied":
            await put_identity(a)
            await b.put("README.md.id", bytes(await a.get("README.md.id")))
        turns = Turns(seed)
        results = await turns.play(
            *(check_identities(urls, {"a": turns.store(a, one), "b": turns.store(b, one)}, "a") for one in (0, 1))
        )
        for result in results:
            if places == "one":  # refused, or not known; never apart
                assert isinstance(result, ConfigError) or result, seed
            else:
                assert not isinstance(result, BaseException), seed
        last = await asyncio.gather(check_identities(urls, {"a": a, "b": b}), return_exceptions=True)
        assert isinstance(last[0], ConfigError) == (places == "one")
        assert places == "one" or await read_identity(a) != await read_identity(b)

    for seed in range(100):
        asyncio.run(work(seed))


def test_commands_refuse_two_names_of_one_server(tmp_path, capsys, credentials):
    with serving(Bucket()) as bucket:
        file, url = tmp_path / "tierd.toml", bucket.url()
        alias = url.replace("127.0.0.1", "localhost")
        assert alias != url
        tiers = [f'[[tier]]\nname = "{name}"\nurl = "{text}"\n' for name, text in (("a", url), ("b", alias))]
        file.write_text(f'spool = "{tmp_path / "spool"}"\n' + "".join(tiers))

        assert command(["config", "check", str(file), "--reach"]) == 3  # also before anything is there
        assert "'b' is the place of tier 'a' under another name" in capsys.readouterr().err
        assert not [key for key in bucket.objects if "README" in key]

        async def identify() -> None:
            async with AsyncExitStack() as stack:
                await put_identity(*(await open_tiers(from_urls("/s", [url]), stack)).values())

        asyncio.run(identify())
        for words in (
            ["config", "check", str(file), "--reach"],
            ["prune", "--config", str(file)],
            ["run", "--config", str(file)],
        ):
            capsys.readouterr()
            assert command(words) == 3
            assert "'b' is the place of tier 'a' under another name" in capsys.readouterr().err
        assert command(["config", "check", str(file)]) == 0  # it asks no tier


@pytest.mark.parametrize("recorded", [True, False])
def test_a_trainer_that_names_one_server_twice_gets_the_reason(tmp_path, credentials, recorded):
    """It got DaemonUnavailable, or nothing at all: its daemon ended, and its tiers stayed empty."""
    with serving(Bucket()) as bucket:
        if recorded:
            bucket.objects["p/README.md.id"] = b'{"format": 1, "id": "511243747ba9f741d7e54a8e7e324d8f"}'
        with pytest.raises(
            ConfigError, match=r"tier 's3-2' is the place of tier 's3' under another name \(s3://.*s3://"
        ):
            tierd.Checkpointer(tmp_path, run="r", to=[bucket.url(), bucket.url().replace("127.0.0.1", "localhost")])
        assert [*bucket.objects] == ["p/README.md.id"] * recorded


@pytest.mark.parametrize("recorded", [True, False])
def test_doctor_names_the_tier_that_is_the_place_of_another(tmp_path, recorded):
    for name in "ab":
        (tmp_path / name).mkdir()
    store = FileStore(tmp_path / "a")
    if recorded:
        asyncio.run(put_identity(store))
    tiers = [ExaminedTier(name, parse_url(str(tmp_path / name)), store, None) for name in "ab"]
    findings = asyncio.run(examine(ExaminationScope(None, 3, 60.0, tiers)))
    assert [result.place for result in findings if result.finding == "another tier's place"] == ["b"]
    assert recorded or not (tmp_path / "a" / "README.md.id").exists()


@pytest.mark.parametrize("data", [b'{"id\xad', b"", b"[" * 100_000, b'{"id": 5}'])
async def test_identity_that_is_no_json_counts_as_absent_and_is_put_again(data: bytes) -> None:
    store = MemoryStore()
    await store.put(IDENTITY_KEY, data)
    assert await read_identity(store) == ""
    assert not await ensure_identity(store)
    assert await read_identity(store)
