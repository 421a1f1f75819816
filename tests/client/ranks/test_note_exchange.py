"""How ranks hear each other: over a store or a directory, with an end to every wait that names who is missing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import msgspec
import pytest
import torch
from support.ranks import environment
from support.threads import together
from support.waiting import BOUND_S
from support.world import Daemon

from tierd.client.client_timings import USUAL_TIMINGS
from tierd.client.preemption.agreement import Notice, StepAgreement
from tierd.client.ranks.boards import DirectoryBoard, StoreBoard, TierBoard
from tierd.client.ranks.note_exchange import NoteExchange
from tierd.core.errors import SpoolUnusable, StoreUnavailable
from tierd.stores.memory_store import MemoryStore

QUICK = 2.0  # seconds of silence after which a rank counts as gone in these tests


@pytest.fixture(params=["store", "directory", "tier"])
def boards(request, tmp_path):
    """Makes one side of a board."""
    if request.param == "tier":
        store, made = MemoryStore(), count()
        nodes = [Daemon(tmp_path / name, {"tier": store}).__enter__() for name in "ab"]
        for node in nodes:
            request.addfinalizer(node.stop)
        return lambda name="launch": _quick(TierBoard(nodes[next(made) % 2].spool, "run", name, 2, "tier"))
    if request.param == "directory":
        return lambda name="launch": _quick(DirectoryBoard(tmp_path, name))
    store = torch.distributed.HashStore()
    request.addfinalizer(store.num_keys)  # a board does not keep it
    return lambda name="launch": _quick(StoreBoard(store, name, "the store"))


def _quick(board):
    board.beat_s, board.poll_s = 0.1, min(board.poll_s, 0.1)
    return board


def exchanges(
    boards, world: int, silent_s: float = QUICK, last_s: float = USUAL_TIMINGS.last_sign_s
) -> list[NoteExchange]:
    made = [NoteExchange(boards(), rank, world, silent_s, last_s) for rank in range(world)]
    assert together(*(lambda one=one: one.begin(60) for one in made)) == [None] * world
    return made


def test_every_rank_gets_every_ranks_note(boards):
    made = exchanges(boards, 3)
    for turn in range(3):
        said = [f"{turn} {rank}".encode() * 1000 for rank in range(3)]
        heard = together(*(lambda rank=rank, said=said: made[rank].exchange(said[rank], 60) for rank in range(3)))
        assert heard == [said] * 3
        assert [one.turn for one in made] == [turn + 1] * 3


def test_another_thread_leaves_notes_in_a_meeting_and_they_end_with_it(boards):
    """A notice of preemption is agreed on while the ranks exchange something else."""
    made = exchanges(boards, 2)
    sides = [StepAgreement(rank, 2, exchange.notes()[1]) for rank, exchange in enumerate(made)]
    notes = [exchange.notes()[0] for exchange in made]
    sides[1].offer(Notice("SIGTERM", "SIGTERM", time.monotonic()))

    def agree(rank: int) -> None:
        end = time.monotonic() + BOUND_S
        step = 0
        while sides[rank].why is None and time.monotonic() < end:
            sides[rank].advance(notes[rank], time.monotonic())
            step += sides[rank].frozen_s is None and not sides[rank].due(step)
            time.sleep(0.02)

    work = [lambda rank=rank: agree(rank) for rank in range(2)]
    work += [lambda one=one: one.exchange(b"x", 60) for one in made]
    assert together(*work)[2:] == [[b"x"] * 2] * 2
    assert [side.why for side in sides] == ["SIGTERM"] * 2
    assert notes[0].read([f"{made[0].notes()[1]}notice/0/all"])
    for one in made:
        one.close()
    if notes[0].outlives:
        assert not notes[0].holds(made[0].notes()[1])


def test_exchange_ignores_notes_that_earlier_processes_left(boards):
    """A launch that is restarted meets at the same place, where its predecessor, which was killed, has left notes."""
    for launch in range(3):
        made = [NoteExchange(boards(), rank, 3, QUICK) for rank in range(3)]

        def come(rank: int, made=made, launch=launch) -> list[bytes]:
            time.sleep(0.05 * ((rank + launch) % 3))
            made[rank].begin(60)
            return made[rank].exchange(f"{launch} {rank}".encode(), 60)

        expected = [f"{launch} {rank}".encode() for rank in range(3)]
        assert together(*(lambda rank=rank: come(rank) for rank in range(3))) == [expected] * 3


def test_rank_that_does_not_arrive_at_all_is_named(boards):
    first = NoteExchange(boards(), 0, 3, QUICK)
    second = NoteExchange(boards(), 1, 3, QUICK)
    one, other = together(lambda: first.begin(1.0), lambda: second.begin(1.0))
    assert isinstance(one, StoreUnavailable) and "rank 2 of 3 did not come" in str(one)
    assert isinstance(other, StoreUnavailable)


def test_a_rank_that_does_something_else_ends_the_wait_of_all(boards):
    made = exchanges(boards, 3)
    answers = together(*(lambda rank=rank: made[rank].exchange(b"", 1.0) for rank in (0, 2)))
    for error in answers:
        assert isinstance(error, StoreUnavailable) and "rank 1 (process" in str(error)
        assert "did not come within" in str(error)
    # The one who comes late is told the same, and all may try again.
    with pytest.raises(StoreUnavailable, match="rank 1"):
        made[1].exchange(b"", 1.0)
    assert together(*(lambda one=one: one.exchange(b"x", 60) for one in made)) == [[b"x"] * 3] * 3


def test_rank_0_that_arrives_late_does_not_continue_alone(boards):
    """Who gave up waiting takes back what it said: else rank 0 would find it, and succeed where the others failed."""
    made = exchanges(boards, 3)
    for error in together(*(lambda rank=rank: made[rank].exchange(b"x", 0.5) for rank in (1, 2))):
        assert isinstance(error, StoreUnavailable) and "rank 0 (process" in str(error)
    with pytest.raises(StoreUnavailable, match=r"rank 1 \(process .*gave up waiting.*rank 2 .*gave up waiting"):
        made[0].exchange(b"x", 60)
    said = [f"{rank}".encode() for rank in range(3)]
    assert together(*(lambda rank=rank: made[rank].exchange(said[rank], 60) for rank in range(3))) == [said] * 3


@pytest.mark.parametrize("interrupted", [0, 2])
def test_rank_that_is_interrupted_notifies_the_others_and_does_not_wait(boards, interrupted):
    made = exchanges(boards, 3)
    others = [rank for rank in range(3) if rank != interrupted]
    made[interrupted].tell(b"interrupted", "is interrupted")
    for heard in together(*(lambda rank=rank: made[rank].exchange(b"x", 60) for rank in others)):
        if interrupted == 0:
            assert isinstance(heard, StoreUnavailable) and "rank 0 (process" in str(heard)
            assert "is interrupted" in str(heard)
        else:
            assert heard == [b"x", b"x", b"interrupted"]
    assert together(*(lambda one=one: one.exchange(b"x", 60) for one in made)) == [[b"x"] * 3] * 3


def test_an_exchange_succeeds_on_all_ranks_or_on_none(boards):
    """Rank 1 gives up at about the moment at which rank 0 comes: in either order, they agree."""
    both = 0
    for seed in range(8):
        first, second = exchanges(lambda seed=seed: boards(f"launch {seed}"), 2, last_s=0.1)

        def late(first=first, seed=seed) -> list[bytes]:
            time.sleep(0.1 + seed * 0.025)
            return first.exchange(b"0", 60)

        answers = together(late, lambda second=second: second.exchange(b"1", 0.2))
        assert len({isinstance(one, StoreUnavailable) for one in answers}) == 1, f"seed {seed}: {answers}"
        both += answers == [[b"0", b"1"]] * 2
    assert both, "no exchange came to its end"


@pytest.mark.parametrize("fault", ["refuses", "hangs"])
def test_exchange_succeeds_though_rank_0_fails_to_remove_its_notes(boards, monkeypatch, fault):
    made = exchanges(boards, 2, silent_s=1.0)
    ending = threading.Event()

    def remove(keys: object) -> None:
        if fault == "hangs":
            ending.wait(60)
        raise OSError("AccessDenied: s3:DeleteObject")

    monkeypatch.setattr(made[0]._board, "remove", remove)
    read, asked = made[0]._board.read, []
    monkeypatch.setattr(made[0]._board, "read", lambda keys: asked.extend(keys) or read(keys))
    assert together(*(lambda one=one: one.exchange(b"x", 60) for one in made)) == [[b"x"] * 2] * 2
    assert not [key for key in asked if key.endswith("/all")], "rank 0 reads its own answer"
    ending.set()


def test_rank_0_that_was_stopped_before_its_answer_fails_with_the_others(boards, monkeypatch):
    """Others may have given up waiting for it meanwhile."""
    made = exchanges(boards, 2)
    put = made[0]._board.put

    def stopped(key: str, value: bytes) -> None:
        put(key, value)
        if key.endswith("/closing"):
            time.sleep(0.6 * QUICK)

    monkeypatch.setattr(made[0]._board, "put", stopped)
    for error in together(*(lambda one=one: one.exchange(b"x", 60) for one in made)):
        assert isinstance(error, StoreUnavailable) and "rank 0 (process" in str(error) and "was stopped" in str(error)


def test_rank_0_may_end_with_its_store_only_when_others_have_read_why():
    """A store that rank 0 hosts ends with it: the others would see a broken connection in place of the reason."""
    store = torch.distributed.HashStore()

    def board() -> StoreBoard:
        made = _quick(StoreBoard(store, "launch", "the store"))
        made.poll_s = 0.5
        return made

    made = [NoteExchange(board(), rank, 3, QUICK) for rank in range(3)]
    assert together(*(lambda one=one: one.begin(60) for one in made)) == [None] * 3

    def first() -> bool:
        with pytest.raises(StoreUnavailable, match="rank 2"):
            made[0].exchange(b"", 1.0)
        return bool(store.check([f"launch/{made[0]._name}/seen/1"]))

    def second() -> None:
        read = made[1]._board.read

        def late(keys: Iterable[str]) -> dict[str, bytes]:
            found = read(keys)
            if any(key.endswith("/0/all") for key in found):
                time.sleep(1.0)  # rank 0 has long noticed that rank 2 is absent
            return found

        made[1]._board.read = late
        with pytest.raises(StoreUnavailable, match="rank 2"):
            made[1].exchange(b"", 1.0)

    assert together(first, second) == [True, None], "rank 0 went on before rank 1 had read the end"


def test_rank_0_waits_at_its_end_for_who_has_not_read(boards):
    first, second = exchanges(boards, 2)
    assert together(*(lambda one=one: one.exchange(b"", 60) for one in (first, second))) == [[b"", b""]] * 2
    assert together(first.close, second.close) == [None, None]


@pytest.mark.parametrize("lost", ["0/1", "0/all"])
def test_exchange_ends_when_a_foreign_writer_removed_a_note(boards, lost):
    """All ranks live, so that none of them is given up: a sweep by a clock that is wrong, or another writer there."""
    made, done = exchanges(boards, 2, silent_s=1.0), threading.Event()
    other, through = boards(), [threading.Event(), threading.Event()]

    def remove() -> None:
        while not done.wait(0.001):
            other.remove([f"{made[0]._name}/{lost}"])

    def talk(rank: int) -> list[bytes]:
        with made[rank].attending():
            try:
                found = made[rank].exchange(b"x", 60)
            finally:
                through[rank].set()
            through[1 - rank].wait(60)
            return found

    thread = threading.Thread(target=remove)
    thread.start()
    try:
        reported = together(lambda: talk(0), lambda: talk(1))
    finally:
        done.set()
        thread.join()
    failed = [isinstance(one, StoreUnavailable) for one in reported]
    assert all(fails or one == [b"x", b"x"] for fails, one in zip(failed, reported, strict=True)), reported
    assert lost == "0/all" or failed in ([True, True], [False, False]), reported
    if any(failed):  # it may be read before it is removed
        assert "is not there any more" in str(reported) or "gave up waiting" in str(reported)


def test_a_hello_that_was_written_over_is_said_again(boards):
    """A process that is about to die writes over that of the one in its place."""
    first, second, dying = (
        NoteExchange(boards(), 0, 2, QUICK),
        NoteExchange(boards(), 1, 2, QUICK),
        NoteExchange(boards(), 1, 2, QUICK),
    )

    def die() -> None:
        time.sleep(0.5)
        dying._board.put("hello/1", msgspec.json.encode(dying._me))
        time.sleep(0.5)

    def late() -> None:
        time.sleep(1.0)
        first.begin(60)

    assert together(late, lambda: second.begin(60), die) == [None] * 3


def test_exchange_names_a_rank_that_died_while_all_begin(tmp_path):
    script = _PEER.replace(
        "exchange.begin(30)",
        "exchange._board.put('hello/1', __import__('msgspec').json.encode(exchange._me)); sys.exit()",
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path), "1", "5"], env=environment(), check=True, timeout=150)
    with pytest.raises(StoreUnavailable, match=r"rank 1 \(process \d+ on .*\) has ended"):
        NoteExchange(_quick(DirectoryBoard(tmp_path, "launch")), 0, 2, QUICK).begin(1.0)


_BEGINNING = """
import sys
from pathlib import Path
from tierd.client.ranks.boards import DirectoryBoard
from tierd.client.ranks.note_exchange import NoteExchange
from tierd.core.errors import StoreUnavailable
board = DirectoryBoard(Path(sys.argv[1]), "launch")
board.beat_s = 0.1
exchange = NoteExchange(board, int(sys.argv[2]), 2, float(sys.argv[3]))
print("begins", flush=True)
try:
    exchange.begin(float(sys.argv[4]))
    print("met", flush=True)
except StoreUnavailable as error:
    print(error, flush=True)
"""
_STEP = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NODEID": "0"}


def _start(command: list[str], number: int, tasks: str) -> subprocess.Popen[str]:
    env = environment(**_STEP, SLURM_PROCID=str(number), SLURM_STEP_TASKS_PER_NODE=tasks)
    return subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("tasks", "other", "reported"),
    [
        ("2", "slow", "met"),
        ("2", "killed", "rank 1 of 2 ended before all had begun: no such process is left on "),
        ("2", "never there", "rank 1 of 2 ended before all had begun: no such process is left on "),
        # The launcher says that rank 1 is on another node, and only a process that was seen is known to have ended.
        ("1(x2)", "killed", "rank 1 of 2 ended before all had begun: no such process is left on "),
        ("1(x2)", "never there", "rank 1 of 2 did not come within 2 s"),
    ],
)
def test_rank_that_ended_before_it_began_differs_from_a_slow_rank(tmp_path, tasks, other, reported):
    """A slow rank imports its modules: it has a process with its rank in the environment, and leaves no notes."""
    script, late_s = [sys.executable, "-c", _BEGINNING, str(tmp_path)], "2" if reported.endswith(" 2 s") else "100"
    waits = ["sh", "-c", 'read line; exec "$@"', "sh", *script, "1", "1", late_s]
    with ExitStack() as started:

        def start(command: list[str], number: int) -> subprocess.Popen[str]:
            process = started.enter_context(_start(command, number, tasks))
            started.callback(process.kill)
            return process

        second = start(waits, 1) if other != "never there" else None
        first = start([*script, "0", "1", late_s], 0)
        assert first.stdout.readline() == "begins\n"
        begun = time.monotonic()
        if other == "slow":
            time.sleep(2)  # twice its silence
            print(file=second.stdin, flush=True)
        elif other == "killed":
            time.sleep(1)  # so that rank 0 has seen it
            second.kill()
            second.wait()
        assert first.stdout.readline().startswith(reported)
        assert time.monotonic() - begun < 60


def test_a_rank_that_hides_its_environment_has_not_ended():
    """As one that sets its process's title, which overwrites the environment that the kernel shows."""
    script = """
import os, subprocess, sys
from tierd.client.ranks import rank_processes
other = subprocess.Popen(["sleep", "60"], env={**os.environ, "SLURM_PROCID": "1"})
siblings = rank_processes.NodeSiblings(0, 2)
found = [siblings.ended_ranks()]
recognise = siblings._rank
siblings._rank = lambda pid: None if pid == other.pid else recognise(pid)
found.append(siblings.ended_ranks())
other.kill()
other.wait()
print(*found, siblings.ended_ranks())
"""
    with _start([sys.executable, "-c", script], 0, "2") as process:
        assert process.communicate(timeout=150)[0] == "set() set() {1}\n"


def test_ranks_on_other_nodes_learn_that_a_rank_has_ended(monkeypatch):
    """Only a rank on its node can see that; the others would wait for ten minutes."""
    store = torch.distributed.HashStore()

    class Seen:
        def __init__(self, rank: int, world: int) -> None:
            self.found = {3} if rank == 2 else set()

        def ended_ranks(self) -> set[int]:
            return self.found

    monkeypatch.setattr("tierd.client.ranks.rank_processes.NodeSiblings", Seen)
    boards = [_quick(StoreBoard(store, "launch", "the store", exclusive=True)) for _ in range(3)]
    made = [NoteExchange(board, rank, 4, QUICK) for rank, board in enumerate(boards)]
    for error in together(*(lambda one=one: one.begin(100) for one in made)):
        assert isinstance(error, StoreUnavailable) and "rank 3 of 4 ended before all had begun" in str(error)


def test_the_thread_ends_with_its_meeting(boards):
    made = exchanges(boards, 2)
    assert together(*(lambda one=one: one.exchange(b"", 60) for one in made)) == [[b"", b""]] * 2
    threads = [one._thread for one in made]
    for one in made:
        one.close()
    assert not any(thread.is_alive() for thread in threads), "a call of torch's store aborts a process that exits"
    assert together(*(lambda one=one: one.exchange(b"", 60) for one in made)) == [[b"", b""]] * 2, (
        "it can be used again"
    )


def test_process_exits_while_its_exchange_thread_calls_the_store():
    """A thread that is inside torch's store when the interpreter ends aborts the process."""
    script = """
import threading, time
import torch
from tierd.client.ranks.boards import StoreBoard
from tierd.client.ranks.note_exchange import NoteExchange
store = torch.distributed.TCPStore("127.0.0.1", 0, 1, is_master=True)
exchanges = [NoteExchange(StoreBoard(store, name, "the store"), 0, 1, 60) for name in "abc"]
calls_begun = threading.Barrier(4)
def call_store(exchange):
    calls_begun.wait(60)
    end_s = time.monotonic() + 2
    while time.monotonic() < end_s:
        exchange._beat()
for exchange in exchanges:
    exchange.begin(60)
    exchange._submit(lambda exchange=exchange: call_store(exchange))
calls_begun.wait(60)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment())
    assert ended.returncode == 0, ended.stderr


def test_a_signal_handler_closes_while_the_thread_is_started(tmp_path):
    """The handler interrupts the thread that holds the lock."""
    made = NoteExchange(_quick(DirectoryBoard(tmp_path, "launch")), 0, 1, QUICK)
    made.begin(60)
    made.close()
    handled: list[bool] = []

    def work() -> None:
        real = threading.Thread.start

        def start(thread: threading.Thread) -> None:
            real(thread)
            if not handled and thread.name == "tierd-ranks":
                handled.append(True)
                made.close()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            made.exchange(b"", 60)

    training = threading.Thread(target=work, daemon=True)
    training.start()
    training.join(60)
    assert handled and not training.is_alive()


def test_a_store_is_not_kept_alive():
    """Else a group that is made again at the same address finds the server of the one before, with its keys."""
    store = torch.distributed.HashStore()
    board = StoreBoard(store, "launch", "the store")
    board.put("key", b"value")
    assert board.get("key") == b"value"
    del store
    with pytest.raises(RuntimeError, match="make a new Checkpointer"):
        board.get("key")


def test_a_rank_that_works_is_waited_for_much_longer(boards):
    made = exchanges(boards, 2, silent_s=1.0)

    def late() -> list[bytes]:
        with made[1].attending():
            time.sleep(2)
            return made[1].exchange(b"1", 0.5)

    begun = threading.Event()

    def first() -> list[bytes]:
        begun.set()
        time.sleep(0.3)
        return made[0].exchange(b"0", 0.5)

    assert together(first, late) == [[b"0", b"1"]] * 2


_PEER = """
import sys, time
from pathlib import Path
from tierd.client.ranks.boards import DirectoryBoard
from tierd.client.ranks.note_exchange import NoteExchange
board = DirectoryBoard(Path(sys.argv[1]), "launch")
board.beat_s = 0.1
rank = int(sys.argv[2])
exchange = NoteExchange(board, rank, 2, float(sys.argv[3]))
exchange.begin(30)
with exchange.attending():
    print("in", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_stopped_or_dies_is_named(tmp_path, how, victim):
    """Stopped: after the silence. Dead on this node: at once, because its process is looked at."""
    silent_s = 1.5 if how == signal.SIGSTOP else 60.0
    peer = subprocess.Popen(
        [sys.executable, "-c", _PEER, str(tmp_path), str(victim), str(silent_s)],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        exchange = NoteExchange(_quick(DirectoryBoard(tmp_path, "launch")), 1 - victim, 2, silent_s)
        exchange.begin(60)
        assert peer.stdout.readline() == "in\n"
        time.sleep(0.3)  # one more sign of life
        os.kill(peer.pid, how)
        if how == signal.SIGKILL:
            peer.wait()
        word = "has given no sign of life" if how == signal.SIGSTOP else "has ended"
        with pytest.raises(StoreUnavailable, match=rf"rank {victim} \(process {peer.pid} .*\) {word}"):
            exchange.exchange(b"", 60)
    finally:
        peer.kill()
        peer.wait()
        peer.stdout.close()


def test_a_board_that_hangs_ends_the_wait():
    """As a store whose host was stopped: a call of it does not return."""

    class Hanging:
        description, poll_s, beat_s = "the store", 0.02, 0.1

        def put(self, key: str, value: bytes) -> None:
            threading.Event().wait(60)

        get = remove = put

    hanging = NoteExchange(Hanging(), 0, 2, silent_s=1.0)
    with pytest.raises(StoreUnavailable, match="the store does not answer"):
        hanging.begin(60)


def test_a_board_that_fails_is_named(tmp_path):
    board = DirectoryBoard(tmp_path, "launch")
    (tmp_path / "meetings").chmod(0o700)
    for path in (tmp_path / "meetings").iterdir():
        path.rmdir()
        path.write_text("no directory")
    with pytest.raises((StoreUnavailable, SpoolUnusable), match="meetings"):
        NoteExchange(board, 0, 2, QUICK).begin(2)


def test_notes_of_launches_that_ended_long_ago_are_swept(tmp_path):
    old = DirectoryBoard(tmp_path, "old")
    old.put("a/b", b"x")
    assert old.get("a/b") == b"x" and old.get("a/c") is None
    room: Path = tmp_path / "meetings"
    (path,) = room.iterdir()
    os.utime(path, (0, 0))
    DirectoryBoard(tmp_path, "new")
    assert path not in set(room.iterdir())
    old.put("a/b", b"y")  # one that still runs goes on
    assert old.get("a/b") == b"y"
    old.remove(["a/b"])
    assert old.get("a/b") is None


def test_the_room_of_meetings_is_no_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "meetings").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SpoolUnusable, match="a link"):
        DirectoryBoard(tmp_path, "launch")
