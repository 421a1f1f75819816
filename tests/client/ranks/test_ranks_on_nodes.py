"""Ranks on several nodes without a process group: they talk through their daemons and the first tier."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from contextlib import ExitStack, contextmanager

import pytest
from stores.s3.test_s3_store import credentials
from support import threads
from support.doubles import Counting
from support.ranks import environment, is_launchers, processes
from support.s3stub import Bucket, serving
from support.timed import timed
from support.training import tensors
from support.waiting import wait_until
from support.world import Daemon

import tierd
from tierd.client.checkpointer import internals
from tierd.client.ranks import boards
from tierd.client.ranks.boards import TierBoard
from tierd.client.ranks.launchers import is_single_node, launch_name
from tierd.client.ranks.note_exchange import NoteExchange
from tierd.core.errors import ConfigError, DaemonUnavailable, StoreRefused, StoreUnavailable
from tierd.core.urls import parse_url
from tierd.daemon.tiers import node_records
from tierd.ipc import message_codec, messages
from tierd.spool.spool import Spool
from tierd.stores.encrypted_store import EncryptedStore
from tierd.stores.encryption_keys import EncryptionKey
from tierd.stores.file_store import FileStore
from tierd.stores.memory_store import MemoryStore
from tierd.stores.open import open_store

__all__ = ["credentials"]  # the fixture

DAY_MS = 86_400_000
LAUNCH = "a launch"

together = functools.partial(threads.together, limit_s=60.0)  # notes go over tiers


def board(daemon: Daemon, launch: str = LAUNCH) -> TierBoard:
    made = TierBoard(daemon.spool, "run", launch, 2, "tier tier")
    made.poll_s = 0.05
    return made


def notes(store: MemoryStore) -> list[str]:
    return sorted(key for key in store.objects if key.startswith("run/meetings/"))


@contextmanager
def two_nodes(home, *stores):
    """A spool and a daemon on each of two nodes, over the stores that `stores` make of one tier, one for each."""
    with ExitStack() as running:
        yield [
            running.enter_context(Daemon(home / name, {"tier": store}))
            for name, store in zip("ab", stores, strict=True)
        ]


# -- notes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 10, 39_994, 200_000])
def test_a_note_of_any_length_is_read_whole_on_the_other_node(tmp_path, length):
    store = MemoryStore()
    value = os.urandom(length)
    with two_nodes(tmp_path, store, store) as nodes:
        one, other = map(board, nodes)
        assert other.get("hello/0") is None
        one.put("hello/0", value)
        assert other.read(["hello/0", "hello/1"]) == {"hello/0": value}
        one.put("hello/0", b"shorter")
        assert other.read([f"hello/{rank}" for rank in range(9)]) == {"hello/0": b"shorter"}, "listed first"
        one.put("hello/0", value)
        one.remove(["hello/0"])
        assert other.get("hello/0") is None
        assert [key for key in notes(store) if "/hello." in key] == []


def test_the_requests_of_a_launch_that_meets_on_a_tier(tmp_path):
    """The scale page's formulas, of six ranks on two nodes. Each rank that waits adds polls, a GET or LIST."""
    store, world = Counting(), 6
    with two_nodes(tmp_path, store, store) as nodes:
        ranks = []
        for number in range(world):
            talking = board(nodes[number % 2])
            talking.poll_s = talking.beat_s = 60.0  # a rank that waits reads a few times at first, and then seldom
            ranks.append(NoteExchange(talking, number, world, 200.0))
        store.taken()
        assert together(*(lambda one=one: one.begin(60.0) for one in ranks)) == [None] * world
        met = store.taken()
        assert 3 * world + 2 <= met["PUT"] <= 3 * world + 20, met
        for _ in range(2):
            said = together(*(lambda one=one: one.exchange(b"x", 60.0) for one in ranks))
            assert said == [[b"x"] * world] * world
            wait_until(lambda: all(one._jobs.empty() for one in ranks))
            counted = store.taken()
            assert (counted["PUT"], counted["DELETE"]) == (3 * world + 2, 1), counted
            assert counted["GET"] >= 3 * world and counted["LIST"] >= 2, counted
        together(*(lambda one=one: one.close() for one in ranks))
        assert notes(store) == []


def test_note_that_is_too_long_is_refused_with_a_remedy(tmp_path):
    store = MemoryStore()
    with two_nodes(tmp_path, store, store) as nodes, pytest.raises(ValueError, match=r"initialise torch\.distributed"):
        board(nodes[0]).put("0/all", os.urandom(11 << 20))


def test_a_note_that_is_being_replaced_is_not_there_yet(tmp_path):
    store = MemoryStore()
    with two_nodes(tmp_path, store, store) as nodes:
        one, other = map(board, nodes)
        one.put("hello/0", os.urandom(90_000))
        (piece,) = [key for key in notes(store) if key.endswith("hello.0.p2")]
        asyncio.run(store.put(piece, b"of the next one"))
        assert other.get("hello/0") is None


def test_on_an_encrypted_tier_notes_are_encrypted_and_others_are_not_believed(tmp_path):
    inner = MemoryStore()
    tier = EncryptedStore(inner, EncryptionKey(bytes(range(32))))
    with two_nodes(tmp_path, tier, tier) as nodes:
        one, other = map(board, nodes)
        one.put("hello/0", b"a secret" * 100)
        assert other.get("hello/0") == b"a secret" * 100
        (key,) = [key for key in notes(inner) if "/hello." in key]
        packed = zlib.compress(b"a secret" * 100, 1)
        assert packed not in inner.objects[key][0] and b'"encrypted"' in inner.objects[key][0]
        asyncio.run(inner.put(key.replace("hello.0", "hello.1"), inner.objects[key][0]))
        with pytest.raises(OSError, match=r"hello\.1"):
            other.get("hello/1")


@pytest.mark.parametrize("how", ["deleted", "replaced", "of another process"])
def test_a_note_that_somebody_deletes_or_replaces_ends_in_an_error_or_not_at_all(tmp_path, how):
    """By anyone who can write to the tier, while two ranks find each other and talk."""
    store, done = MemoryStore(), threading.Event()

    def meddle() -> None:
        while not done.wait(0.02):
            for key in [key for key in notes(store) if key.endswith((".hello.1", "/hello.1", ".0.1"))]:
                if how == "deleted":
                    asyncio.run(store.delete([key]))
                elif how == "replaced":
                    asyncio.run(store.put(key, b"garbage"))
                else:
                    mate = {"token": "0" * 16, "host": "x", "scope": "", "pid": 1, "born": None}
                    data = zlib.compress(json.dumps(mate).encode())
                    asyncio.run(store.put(key, boards._HEAD.pack(1, zlib.crc32(data)) + data))

    with two_nodes(tmp_path, store, store) as nodes:
        ranks = []
        for number, node in enumerate(nodes):
            talking = board(node)
            talking.beat_s = 0.1
            ranks.append(NoteExchange(talking, number, 2, 2.0))

        def talk(number: int) -> list[bytes]:
            ranks[number].begin(6.0)
            return ranks[number].exchange(f"{number}".encode(), 6.0)

        meddling = threading.Thread(target=meddle)
        meddling.start()
        try:
            reported = together(lambda: talk(0), lambda: talk(1))
        finally:
            done.set()
            meddling.join()
    failed = [isinstance(one, StoreUnavailable) for one in reported]
    if how == "of another process":  # on a tier that is not encrypted, anyone who writes there speaks for a rank
        assert all(fails or one[0] == b"0" for fails, one in zip(failed, reported, strict=True)), reported
    else:
        assert all(failed) or reported == [[b"0", b"1"]] * 2, reported


def test_board_waits_for_a_killed_daemon_and_continues_with_the_next_daemon(tmp_path):
    store = MemoryStore()
    first = Daemon(tmp_path, {"tier": store}).__enter__()
    talking = board(first)
    talking.put("hello/0", b"before")
    first.stop()
    second = Daemon(tmp_path, {"tier": store})
    threading.Timer(0.5, second.__enter__).start()
    try:
        assert talking.get("hello/0") == b"before"
        talking.put("hello/0", b"after")
        assert talking.get("hello/0") == b"after"
    finally:
        wait_until(lambda: second._ready.is_set())
        second.stop()


def test_without_a_daemon_the_wait_ends(tmp_path):
    asked = []
    talking = TierBoard(Spool(tmp_path), "run", LAUNCH, 2, "tier tier", lambda: asked.append(1), answer_s=0.5)
    with pytest.raises(OSError, match="none is running"):
        talking.put("hello/0", b"")
    assert asked, "no daemon was started in its place"


def test_an_older_daemon_is_named_as_the_side_to_upgrade(tmp_path, monkeypatch):
    monkeypatch.setattr(
        message_codec,
        "_decoder",
        message_codec.msgspec.json.Decoder(messages.Hello | messages.Attach | messages.StatusRequest),
    )
    monkeypatch.delitem(message_codec.REQUESTS, "notes")
    with (
        Daemon(tmp_path, {"tier": MemoryStore()}) as daemon,
        pytest.raises(OSError, match=r"'notes' is not known .*upgrade the daemon"),
    ):
        board(daemon).put("hello/0", b"")


def test_a_tier_that_refuses_is_named_with_its_node(tmp_path, monkeypatch):
    class Refusing(MemoryStore):
        async def put(self, key, data):
            raise StoreRefused("no such bucket")

    with (
        Daemon(tmp_path, {"tier": Refusing()}) as daemon,
        pytest.raises(OSError, match=r"node .*: tier: no such bucket"),
    ):
        board(daemon).put("hello/0", b"")


# -- what is left -----------------------------------------------------------------------------------------------------


def test_notes_of_ranks_that_were_killed_are_swept_by_any_daemon_a_day_later(tmp_path, monkeypatch):
    store = MemoryStore()
    now = [time.time_ns()]
    monkeypatch.setattr(node_records.time, "time_ns", lambda: now[0])
    with two_nodes(tmp_path, store, store) as (one, other):
        board(one).put("hello/1", b"of a rank that is killed")
        before = notes(store)
        assert len(before) == 2, before
        now[0] += (DAY_MS - 60_000) * 1_000_000
        board(other, "the next").put("hello/0", b"")
        assert set(before) < set(notes(store)), "not a day old"
        now[0] += 120_000 * 1_000_000
        board(other, "the third").put("hello/0", b"")
        assert not set(before) & set(notes(store))
        assert len(notes(store)) == 4, "those of the other launches stay"


def test_a_daemon_that_starts_sweeps_the_runs_that_it_saves(tmp_path, monkeypatch):
    store = MemoryStore()
    with Daemon(tmp_path, {"tier": store}) as daemon, tierd.Checkpointer(daemon.spool.root, "run") as checkpointer:
        checkpointer.save(1, tensors(1)).wait("tier", timeout=60)
        board(daemon).put("hello/0", b"")
    now = time.time_ns() + 2 * DAY_MS * 1_000_000
    monkeypatch.setattr(node_records.time, "time_ns", lambda: now)
    assert notes(store)
    with Daemon(tmp_path, {"tier": store}):
        wait_until(lambda: not notes(store))


def test_launch_that_runs_for_long_is_marked_again_and_not_swept(tmp_path, monkeypatch):
    timed(monkeypatch, marked_s=0.0)
    store = MemoryStore()
    with Daemon(tmp_path, {"tier": store}) as daemon:
        talking = board(daemon)
        talking.put("hello/0", b"")
        former = [key for key in notes(store) if "/since." in key]
        time.sleep(0.01)
        talking.put("token/5/0", b"")
        marks = [key for key in notes(store) if "/since." in key]
        assert len(marks) == len(former) == 1 and marks != former


# -- ranks ------------------------------------------------------------------------------------------------------------

_RANK = """
import json, os, sys, time
from support.training import tensors, same
import tierd
from tierd.client.checkpointer import internals
from tierd.client.restoring import part_source
number, spool, room, what = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
os.environ.update({
    "SLURM_PROCID": str(number), "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_NODEID": str(number), "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7",
    "SLURM_JOB_START_TIME": {"first": "1700000000"}.get(what, "1700000100"),
})
def wait(name):
    for _ in range(3000):
        if os.path.exists(f"{room}/{name}"):
            return
        time.sleep(0.01)
    raise SystemExit(f"{name} did not come")
def made(**more):
    return tierd.Checkpointer(spool, "run", **more)
if what == "first":
    with made() as checkpointer:
        assert checkpointer.restore(tensors(0)) is None
        for step in (5, 6)[: 2 - number]:
            checkpointer.save(step, tensors(step * 100 + number)).wait("tier", timeout=60)
        if number == 1:
            with tierd.Checkpointer(f"{room}/late", "run", 1, 2, checkpointer.attempt, to=[]) as late:
                late.save(6, tensors(601)).wait()
    print("{}")
elif what == "second":
    sight = part_source.NodeSource.run_view
    def observing(self):
        if number == 1:  # its last part becomes durable between the two ranks' looks
            wait("looked")
            for name in os.listdir(f"{room}/late/run"):
                os.rename(f"{room}/late/run/{name}", f"{spool}/run/{name}")
        try:
            return sight(self)
        finally:
            open(f"{room}/looked", "w").close()
    part_source.NodeSource.run_view = observing
    state = tensors(0)
    with made() as checkpointer:
        found = checkpointer.restore(state)
        assert same(state, found.step * 100 + number)
        print(json.dumps([found.step, checkpointer.attempt, internals(checkpointer).ranks.can_communicate]))
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["file", "encrypted", "s3"])
def test_ranks_of_a_slurm_step_on_two_nodes_resume_from_the_same_without_a_group(tmp_path, kind, credentials):
    """One rank's part becomes durable between the two ranks' looks: rank 0 saw 5 whole, and rank 1 sees 6."""
    bucket = Bucket()
    (tmp_path / "tier").mkdir()

    def made():
        if kind == "s3":
            return {"tier": open_store(parse_url(bucket.url()))}
        store = FileStore(tmp_path / "tier")
        return {"tier": EncryptedStore(store, EncryptionKey(bytes(range(32)))) if kind == "encrypted" else store}

    def left() -> list[str]:
        if kind == "s3":
            return [key for key in bucket.objects if "/meetings/" in key]
        return [str(path) for path in (tmp_path / "tier" / "run").glob("meetings/*/*")]

    with serving(bucket), Daemon(tmp_path / "a", made) as one, Daemon(tmp_path / "b", made) as other:
        spools = [str(node.spool.root) for node in (one, other)]
        for what in ("first", "second"):
            own = [[str(number), spool, str(tmp_path), what] for number, spool in enumerate(spools)]
            reported = processes(_RANK, own, 200)
            assert left() == [], "ranks that end in order leave nothing"
    first, second = (json.loads(one.splitlines()[-1]) for one in reported)
    assert first == second and first[0] in (5, 6), "rank 0 would go on from 5, and rank 1 from 6"
    assert first[2], "they agree by talking, and not because each reads the same listing of a tier"


def slurm(monkeypatch, **more: str) -> None:
    for name in [name for name in os.environ if is_launchers(name)]:
        monkeypatch.delenv(name)
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_ID": "0"}
    step |= {"SLURM_JOB_ID": "7", "SLURM_JOB_START_TIME": "1700000000", "SLURM_PROCID": "1", "SLURM_NODEID": "1"}
    for name, value in {**step, **more}.items():
        monkeypatch.setenv(name, value)


def test_without_a_tier_ranks_of_a_slurm_step_derive_their_attempt_as_before(tmp_path, monkeypatch):
    slurm(monkeypatch)
    with tierd.Checkpointer(tmp_path, "run", to=[]) as checkpointer:
        assert not internals(checkpointer).ranks.can_communicate and checkpointer.attempt
    with (
        Daemon(tmp_path / "spool", {}) as daemon,
        tierd.Checkpointer(daemon.spool.root, "run") as checkpointer,
    ):
        assert not internals(checkpointer).ranks.can_communicate


def test_ranks_that_were_given_an_attempt_do_not_wait_for_each_other(tmp_path, monkeypatch):
    slurm(monkeypatch)
    with (
        Daemon(tmp_path, {"tier": MemoryStore()}) as daemon,
        tierd.Checkpointer(daemon.spool.root, "run", attempt=tierd.new_attempt()) as checkpointer,
    ):
        assert not internals(checkpointer).ranks.can_communicate


def test_a_node_without_a_daemon_says_so_at_once(tmp_path, monkeypatch):
    """The other nodes' ranks would wait for this one in vain."""
    slurm(monkeypatch)
    with pytest.raises(DaemonUnavailable, match=r"on node .*none is running.*torch\.distributed.*attempt="):
        tierd.Checkpointer(tmp_path, "run")


def test_rank_that_does_not_arrive_is_named_with_the_tier(tmp_path, monkeypatch):
    slurm(monkeypatch)
    reported = r"rank 0 did not come within 1 s \(tier tier \(file:///tier\), through the daemon of node"
    with Daemon(tmp_path, {"tier": MemoryStore()}) as daemon, pytest.raises(ConfigError, match=reported):
        tierd.Checkpointer(daemon.spool.root, "run", start_timeout=1)


def test_an_indexed_job_of_kubernetes_has_a_name(monkeypatch):
    slurm(monkeypatch)
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    names = set()
    for index in ("0", "1"):
        for variable in ("RANK", "JOB_COMPLETION_INDEX"):
            monkeypatch.setenv(variable, index)
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setattr("socket.gethostname", lambda index=index: f"train-{index}")
        assert not is_single_node()
        names.add(launch_name())
    assert len(names) == 1 and None not in names
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    assert launch_name() is None


_STOPPED = """
import os, sys
os.environ.update(eval(sys.argv[1]))
from support.training import tensors
import tierd
checkpointer = tierd.Checkpointer(sys.argv[2], "run", rank_timeout=8)
print("met", flush=True)
sys.stdin.readline()
try:
    checkpointer.restore(tensors(0))
except tierd.TierdError as error:
    print(f"{type(error).__name__}: {error}", flush=True)
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_on_another_node_ends_the_wait_of_all_within_a_minute(tmp_path, victim):
    store = MemoryStore()
    shared = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_ID": "0"}
    shared |= {"SLURM_JOB_ID": "7", "SLURM_JOB_START_TIME": "1700000000"}
    with two_nodes(tmp_path, store, store) as nodes, ExitStack() as started:
        ranks = []
        for number, node in enumerate(nodes):
            own = {**shared, "SLURM_PROCID": str(number), "SLURM_NODEID": str(number)}
            command = [sys.executable, "-c", _STOPPED, repr(own), str(node.spool.root)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            ranks.append(started.enter_context(subprocess.Popen(command, env=environment(), **pipes)))
            started.callback(ranks[-1].kill)
        for rank in ranks:
            assert rank.stdout.readline() == "met\n"
        ranks[victim].send_signal(signal.SIGSTOP)
        begun = time.monotonic()
        other = ranks[1 - victim]
        print(file=other.stdin, flush=True)
        reported = other.stdout.readline()
        assert time.monotonic() - begun < 60
        assert (
            reported.startswith(StoreUnavailable.__name__)
            and f"rank {victim} (process {ranks[victim].pid} on " in reported
        )


def test_a_checkpoint_of_another_run_is_none_of_its_notes(tmp_path):
    """Notes are no manifests: nothing that looks for checkpoints finds them."""
    store = MemoryStore()
    with Daemon(tmp_path, {"tier": store}) as daemon:
        board(daemon).put("hello/0", b"x")
        with tierd.Checkpointer(daemon.spool.root, "run") as checkpointer:
            assert checkpointer.restore(tensors(0)) is None
            checkpointer.save(1, tensors(1)).wait("tier", timeout=60)
        daemon.settle()
        assert daemon.reconciler.tiers.observed.has(next(iter(daemon.spool.parts())), "tier")
