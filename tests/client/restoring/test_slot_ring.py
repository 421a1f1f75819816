"""Restores past the spool: chunks through slots that the daemon fills, and whatever it does, only right bytes."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress

import pytest
import torch
from support.doubles import Double, contents, flip, is_chunk
from support.ranks import Group
from support.timed import timed_client
from support.waiting import wait_until
from support.world import Daemon, hurry

import tierd
from tierd.client.restoring import part_access, slot_ring
from tierd.client.restoring.part_fetch import FetchProgress
from tierd.client.restoring.slot_ring import SlotMemory, SlotRing, SlotsUnavailable
from tierd.core.errors import (
    ConfigError,
    DaemonSilent,
    DaemonUnavailable,
    RequestUnknown,
    StateMismatch,
    StoreUnavailable,
    TierdError,
)
from tierd.core.ids import PartId
from tierd.daemon.tiers.tier_objects import read_manifest
from tierd.daemon.transfer.slot_fills import SlotFills
from tierd.reading import Reader
from tierd.spool.spool import Spool
from tierd.stores.encrypted_store import EncryptedStore
from tierd.stores.encryption_keys import EncryptionKey
from tierd.stores.memory_store import MemoryStore

NUMBERS = 400_000  # of a tensor, which has a chunk of its own then


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    hurry(monkeypatch)
    monkeypatch.setattr("tierd.ipc.messages.HEARTBEAT", 0.05)


@pytest.fixture
def spool(tmp_path) -> Spool:
    return Spool(tmp_path / "spool")


def weights(step: int) -> dict:
    """Numbers that are compressed, noise that is not, plain values, and few small ones."""
    draw = torch.Generator().manual_seed(step)
    return {
        "normal": torch.randn(NUMBERS, generator=draw) * 0.02,
        "noise": torch.randint(-(2**62), 2**62, (NUMBERS,), generator=draw),
        "half": (torch.randn(2 * NUMBERS, generator=draw) * 0.02).bfloat16(),
        "small": torch.full((10,), float(step)),
        "table": {f"key {n}": n * step for n in range(5000)},
        "step": step,
    }


def blank() -> dict:
    fresh = {name: torch.zeros_like(value) for name, value in weights(0).items() if isinstance(value, torch.Tensor)}
    return {**fresh, "table": {}, "step": -1}


def equal(state: dict, step: int) -> bool:
    expected = weights(step)
    return all(
        torch.equal(state[name], value) if isinstance(value, torch.Tensor) else state[name] == value
        for name, value in expected.items()
    )


def put(daemon: Daemon, *steps: int) -> list[PartId]:
    """Save on the tiers, and leave nothing in the spool, as on a fresh node."""
    parts = []
    with tierd.Checkpointer(daemon.spool.root, "run") as checkpointer:
        for step in steps:
            saved = checkpointer.save(step, weights(step))
            saved.wait()
            parts.append(saved.part)
            daemon.settle()
    for part in parts:
        daemon.spool.remove([part])
    daemon.settle()
    return parts


def restore(spool: Spool, state: dict) -> tierd.Restored | None:
    with tierd.Checkpointer(spool.root, "run") as checkpointer:
        return checkpointer.restore(state)


def large_chunks(store: Double) -> list[str]:
    return [key for key, (data, _) in store.inner.objects.items() if is_chunk(key) and len(data) > NUMBERS]


@pytest.mark.parametrize("encrypted", [False, True])
def test_restore_on_a_fresh_node_writes_live_tensors_and_no_file(spool, encrypted):
    inner = MemoryStore()
    store = Double(EncryptedStore(inner, EncryptionKey(bytes(32))) if encrypted else inner)
    with Daemon(spool.root, {"tier": store}) as daemon:
        (part,) = put(daemon, 1)
        state = blank()
        addresses = {name: value.data_ptr() for name, value in state.items() if isinstance(value, torch.Tensor)}
        assert restore(spool, state).tier == "tier" and equal(state, 1)
        assert addresses == {name: state[name].data_ptr() for name in addresses}
        assert not spool.has(part) and not spool.fetch_directory(part).exists()
        wait_until(lambda: not daemon.handoff.handed_over_bytes())


@pytest.mark.parametrize(("kind", "name"), [("patch", "noise"), ("delta", "half")])
@pytest.mark.parametrize("encrypted", [False, True])
def test_patch_is_decoded_by_the_daemon_and_by_a_reader(spool, kind, name, encrypted):
    inner = MemoryStore()
    store = Double(EncryptedStore(inner, EncryptionKey(bytes(32))) if encrypted else inner)
    with Daemon(spool.root, {"tier": store}, keep=100) as daemon:
        with tierd.Checkpointer(spool.root, "run") as checkpointer:
            state = weights(1)
            checkpointer.save(1, state).wait()
            daemon.settle()
            if kind == "delta":
                state["half"].view(torch.int16)[::30] += 1
            else:
                state["noise"][5] = 7
            saved = checkpointer.save(2, state)
            saved.wait()
            daemon.settle()
        spool.remove(list(spool.parts()))
        assert any(key.rpartition(".")[2].startswith(kind) for key in store.puts())
        found = blank()
        assert restore(spool, found).step == 2
        assert torch.equal(found[name], state[name]) and not spool.has(saved.part)
    with Reader({"tier": store}, "run") as reader:
        read = blank()
        assert reader.restore(read).step == 2 and torch.equal(read[name], state[name])


def test_chunk_that_is_wrong_on_one_tier_is_read_from_the_other_and_repaired(spool):
    stores = {"a": Double(), "b": Double()}
    with Daemon(spool.root, stores) as daemon:
        (part,) = put(daemon, 1)
        daemon.call(flip(stores["a"].inner, large_chunks(stores["a"])[-1]))
        right = daemon.call(contents(stores["b"].inner))
        state = blank()
        assert restore(spool, state).tier in ("a", "b") and equal(state, 1)
        assert spool.has(part), "the whole way found out what is wrong where"
        wait_until(lambda: all(daemon.call(contents(stores["a"].inner)).get(key) == right[key] for key in right))


def test_chunk_that_is_wrong_everywhere_makes_the_restore_take_the_checkpoint_before(spool):
    store = Double()
    with Daemon(spool.root, {"tier": store}, keep=100) as daemon:
        put(daemon, 1, 2)
        daemon.call(flip(store.inner, next(key for key in large_chunks(store) if "/000000000002." in key)))
        state = blank()
        restored = restore(spool, state)
        assert restored.step == 1 and [skip.step for skip in restored.skipped] == [2] and equal(state, 1)


def test_tier_that_stops_in_the_middle_is_an_error_and_saves_are_refused_until_a_restore(spool):
    store, asked = Double(), []

    def stop(operation: str, key: str) -> None:
        if operation == "get" and is_chunk(key):
            asked.append(key)
            if len(asked) > 3:
                store.error = StoreUnavailable("the tier is gone")

    with Daemon(spool.root, {"tier": store}, keep=100) as daemon:
        put(daemon, 1, 2)
        store.before, state = stop, blank()
        with tierd.Checkpointer(spool.root, "run") as checkpointer:
            with pytest.raises(StoreUnavailable):
                checkpointer.restore(state)
            with pytest.raises(ConfigError, match="the last restore failed"):
                checkpointer.save(3, state)
            store.error = store.before = None
            assert checkpointer.restore(state).step == 2 and equal(state, 2)
            checkpointer.save(3, state).wait()


def test_daemon_that_ends_in_the_middle_is_an_error_and_its_successor_restores(spool, monkeypatch):
    store, reached = Double(), threading.Event()
    with Daemon(spool.root, {"tier": store}) as daemon:
        put(daemon, 1)
        asked = []

        def hang(operation: str, key: str) -> None:
            if operation == "get" and is_chunk(key):
                asked.append(key)
                if len(asked) > 3:
                    store.delay = 1000.0
                    reached.set()

        store.before, state = hang, blank()
        failed: list[BaseException] = []

        def go() -> None:
            try:
                restore(spool, state)
            except TierdError as error:
                failed.append(error)

        thread = threading.Thread(target=go)
        thread.start()
        assert reached.wait(60)
        daemon.stop()
        thread.join(60)
        assert failed and isinstance(failed[0], DaemonUnavailable | StoreUnavailable)
    store.before, store.delay = None, 0.0
    with Daemon(spool.root, {"tier": store}):
        assert restore(spool, state).step == 1 and equal(state, 1)


def test_restore_waits_once_for_a_daemon_that_is_stopped(spool, monkeypatch):
    """It waited for the slots, and then as long for the fetch: more than a minute."""
    store = Double()
    with Daemon(spool.root, {"tier": store}) as daemon:
        put(daemon, 1)
        monkeypatch.setattr("tierd.ipc.messages.HEARTBEAT", 1000.0)
        monkeypatch.setattr(slot_ring, "SILENCE_S", 0.5)
        monkeypatch.setattr(part_access.PartAccess, "put_right", None)
        store.before = lambda operation, key: setattr(store, "delay", 1000.0) if is_chunk(key) else None
        with pytest.raises(DaemonSilent, match="sends no chunk; it may be stopped"):
            restore(spool, blank())


def test_daemon_without_slots_fetches_into_the_spool(spool, caplog):
    with Daemon(spool.root, {"tier": Double()}) as daemon:
        (part,) = put(daemon, 1)
        daemon.handoff.open_slots = None
        state = blank()
        with caplog.at_level("INFO", "tierd"):
            assert restore(spool, state).tier == "tier" and equal(state, 1)
        assert spool.has(part) and "into the spool" in caplog.text


def test_older_daemon_that_does_not_know_the_request_fetches_into_the_spool(spool, monkeypatch):
    def unknown(*_: object) -> SlotRing:
        raise SlotsUnavailable(str(RequestUnknown("request 'lend-slots' is not known")))

    with Daemon(spool.root, {"tier": Double()}) as daemon:
        (part,) = put(daemon, 1)
        monkeypatch.setattr(part_access, "SlotRing", unknown)
        state = blank()
        assert restore(spool, state).tier == "tier" and equal(state, 1) and spool.has(part)


def _flip_first(fills, request, answer) -> dict:
    fills._memory[request.begin] ^= 1
    return answer


LIES = {
    "other bytes": _flip_first,
    "other slot": lambda fills, request, answer: {**answer, "begin": answer["begin"] + 4096},
    "no slot": lambda fills, request, answer: {**answer, "begin": "x"},
    "raw": lambda fills, request, answer: {**answer, "codec": "raw"},
    "planes": lambda fills, request, answer: {**answer, "codec": "planes"},
    "unknown codec": lambda fills, request, answer: {**answer, "codec": "later"},
    "too long": lambda fills, request, answer: {**answer, "size": 200 << 20},
    "empty": lambda fills, request, answer: {**answer, "size": 0},
    "other digest": lambda fills, request, answer: {**answer, "digest": "0" * 32},
    "no digest": lambda fills, request, answer: {**answer, "digest": None},
    "no answer members": lambda fills, request, answer: {},
}


@pytest.mark.parametrize("lie", LIES)
def test_daemon_that_lies_about_a_slot_is_not_believed(spool, monkeypatch, lie):
    real = SlotFills.fill

    async def fill(self, request):
        return LIES[lie](self, request, await real(self, request))

    with Daemon(spool.root, {"tier": Double()}) as daemon:
        put(daemon, 1)
        monkeypatch.setattr(SlotFills, "fill", fill)
        state = blank()
        assert restore(spool, state).tier == "tier" and equal(state, 1)


def test_slots_that_change_while_they_are_read_give_only_right_bytes(spool, monkeypatch):
    real, end, memories = SlotFills.fill, threading.Event(), []

    def scribble(memory: memoryview) -> None:
        at = 0
        while not end.wait(0.0001):
            at = (at + 65_537) % (1 << 23)
            memory[at] ^= 255

    async def fill(self, request):
        answer = await real(self, request)
        if not memories:
            memories.append(threading.Thread(target=scribble, args=(self._memory,)))
            memories[0].start()
        return answer

    with Daemon(spool.root, {"tier": Double()}) as daemon:
        put(daemon, 1)
        monkeypatch.setattr(SlotFills, "fill", fill)
        state = blank()
        try:
            assert restore(spool, state).tier == "tier" and equal(state, 1)
        finally:
            end.set()
            for thread in memories:
                thread.join()


def test_daemon_releases_slots_when_their_client_dies(spool):
    store = Double()
    with Daemon(spool.root, {"tier": store}) as daemon:
        (part,) = put(daemon, 1)
        ring = SlotRing(spool, part, FetchProgress(part), SlotMemory())
        store.delay = 1000.0
        ring._ask(deque(where for where, _ in ring.manifest.places()))
        wait_until(lambda: any(line.slots and line.slots._running for line in daemon.handoff.connections))
        assert daemon.handoff.handed_over_bytes()
        (line,) = [line for line in daemon.handoff.connections if line.slots]
        ring.release()
        wait_until(lambda: not daemon.handoff.handed_over_bytes() and not line.slots._running)
        store.delay = 0.0
        state = blank()
        assert restore(spool, state).step == 1 and equal(state, 1)


def test_several_clients_read_one_part_at_a_time(spool):
    with Daemon(spool.root, {"tier": Double()}) as daemon:
        (part,) = put(daemon, 1)
        read: list[dict] = [{}, {}, {}]

        def go(chunks: dict) -> None:
            ring = SlotRing(spool, part, FetchProgress(part), SlotMemory())
            work = deque(where for where, _ in ring.manifest.places())
            chunks.update((where, bytes(data)) for where, data in ring.each(work))
            ring.release()

        threads = [threading.Thread(target=go, args=(chunks,)) for chunks in read]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert read[0] and read[0] == read[1] == read[2]


def test_slow_client_gets_right_chunks(spool):
    with Daemon(spool.root, {"tier": Double()}) as daemon:
        (part,) = put(daemon, 1)
        ring = SlotRing(spool, part, FetchProgress(part), SlotMemory())
        work, pause = deque(where for where, _ in ring.manifest.places()), threading.Event()
        for _ in ring.each(work):
            pause.wait(0.2)
        assert not work
        ring.release()


def test_fetch_without_a_byte_is_given_up(spool, monkeypatch):
    store = Double()
    with Daemon(spool.root, {"tier": store}) as daemon:
        (part,) = put(daemon, 1)
        timed_client(monkeypatch, stalled_s=0.3)
        store.before = lambda operation, key: setattr(store, "delay", 1000.0) if is_chunk(key) else None
        with pytest.raises(StoreUnavailable, match="no byte"):
            restore(spool, blank())
        with suppress(OSError):
            assert not spool.has(part)


@pytest.mark.parametrize("has_tier", [False, True])
def test_restart_reads_the_spool_into_live_tensors(spool, has_tier):
    with Daemon(spool.root, {"tier": Double()} if has_tier else {}, keep=100):
        with tierd.Checkpointer(spool.root, "run") as checkpointer:
            checkpointer.save(1, weights(1)).wait()
            saved = checkpointer.save(2, weights(2))
            saved.wait()
        state = blank()
        address = state["normal"].data_ptr()
        assert restore(spool, state).step == 2 and equal(state, 2)
        assert state["normal"].data_ptr() == address


def test_ranks_fall_back_together_when_the_rest_of_a_part_is_wrong_everywhere(spool, monkeypatch):
    """Rank 1 finds out after both have agreed: rank 0's live tensors have step 2 by then, and receive step 1."""
    store, group = Double(), Group(2)
    group.install(monkeypatch)
    with Daemon(spool.root, {"tier": store}, keep=100) as daemon:

        def save(rank: int) -> None:
            with tierd.Checkpointer(spool.root, "run") as checkpointer:
                for step in (1, 2):
                    checkpointer.save(step, weights(10 * step + rank)).wait()

        group.run(save)
        daemon.settle()
        spool.remove(list(spool.parts()))
        chunks = [key for key in large_chunks(store) if "/000000000002." in key and "/00001/" in key]
        assert chunks
        daemon.call(flip(store.inner, chunks[0]))
        states = [blank(), blank()]

        def load(rank: int) -> tuple[int, list[int]]:
            with tierd.Checkpointer(spool.root, "run") as checkpointer:
                restored = checkpointer.restore(states[rank])
                return restored.step, [skip.step for skip in restored.skipped]

        assert group.run(load) == [(1, [2]), (1, [2])]
    assert equal(states[0], 10) and equal(states[1], 11)


def replicated_state(step: int) -> dict:
    draw = torch.Generator().manual_seed(step)
    return {"model": {f"layer{number}": torch.randn(NUMBERS, generator=draw) for number in range(4)}}


def put_replicated(daemon: Daemon, group: Group, *steps: int) -> list[PartId]:
    """Have two ranks save on the tiers, each its share, and leave nothing in the spool."""

    def save(rank: int) -> None:
        with tierd.Checkpointer(daemon.spool.root, "run", replicated=("model",)) as checkpointer:
            for step in steps:
                checkpointer.save(step, replicated_state(step)).wait()

    assert group.run(save) == [None, None]
    daemon.settle()
    parts = list(daemon.spool.parts())
    daemon.spool.remove(parts)
    return parts


def restore_replicated(spool: Spool, group: Group, states: list[dict]) -> list:
    def load(rank: int) -> tuple[int, list[int]]:
        with tierd.Checkpointer(spool.root, "run", replicated=("model",)) as checkpointer:
            restored = checkpointer.restore(states[rank])
            return restored.step, [skip.step for skip in restored.skipped]

    return group.run(load)


def is_replicated_state(state: dict, step: int) -> bool:
    expected = replicated_state(step)["model"]
    return all(torch.equal(state["model"][name], tensor) for name, tensor in expected.items())


def test_other_ranks_tensors_are_brought_into_live_tensors_and_read_once(spool, monkeypatch):
    store, group = Double(), Group(2).install(monkeypatch)
    with Daemon(spool.root, {"tier": store}, keep=100) as daemon:
        put_replicated(daemon, group, 1)
        states = [replicated_state(100), replicated_state(100)]
        addresses = [[tensor.data_ptr() for tensor in state["model"].values()] for state in states]
        chunks, store.calls[:] = set(large_chunks(store)), []
        assert len(chunks) == 4
        assert restore_replicated(spool, group, states) == [(1, []), (1, [])]
        gets = [key for operation, key in store.calls if operation == "get" and key in chunks]
        assert sorted(gets) == sorted(chunks)
        assert not any(spool.has(part) or spool.fetch_directory(part).exists() for part in spool.parts())
    assert all(is_replicated_state(state, 1) for state in states)
    assert addresses == [[tensor.data_ptr() for tensor in state["model"].values()] for state in states]


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_take_the_checkpoint_before_when_a_part_that_both_read_is_wrong_everywhere(spool, monkeypatch, rank):
    store, group = Double(), Group(2).install(monkeypatch)
    with Daemon(spool.root, {"tier": store}, keep=100) as daemon:
        newest = [part for part in put_replicated(daemon, group, 1, 2) if part.checkpoint.step == 2]
        (part,) = [part for part in newest if part.rank == rank]
        held = {chunk.xxh3_128 for chunk in daemon.call(read_manifest(store, part)).chunks() if chunk.size > NUMBERS}
        key = next(key for key in large_chunks(store) if key.split("/")[-1].partition(".")[0] in held)
        daemon.call(flip(store.inner, key))
        states = [replicated_state(100), replicated_state(100)]
        assert restore_replicated(spool, group, states) == [(1, [2]), (1, [2])]
    assert all(is_replicated_state(state, 1) for state in states)


def test_part_of_another_rank_that_is_wrong_on_one_tier_is_repaired(spool, monkeypatch):
    stores, group = {"a": Double(), "b": Double()}, Group(2).install(monkeypatch)
    with Daemon(spool.root, stores, keep=100) as daemon:
        put_replicated(daemon, group, 1)
        key = large_chunks(stores["a"])[-1]
        right = daemon.call(contents(stores["a"].inner))[key]
        daemon.call(flip(stores["a"].inner, key))
        states = [replicated_state(100), replicated_state(100)]
        assert restore_replicated(spool, group, states) == [(1, []), (1, [])]
        wait_until(lambda: daemon.call(contents(stores["a"].inner)).get(key) == right)
    assert all(is_replicated_state(state, 1) for state in states)


@pytest.mark.parametrize("is_fresh", [False, True])
def test_files_that_save_did_not_write_are_refused_for_a_state(spool, is_fresh):
    with Daemon(spool.root, {"tier": Double()}, keep=100) as daemon:
        with tierd.Checkpointer(spool.root, "run") as checkpointer, checkpointer.stage(1) as directory:
            (directory / "own.bin").write_bytes(b"own")
        daemon.settle()
        if is_fresh:
            spool.remove(list(spool.parts()))
        with pytest.raises(StateMismatch, match="written through stage"):
            restore(spool, blank())
