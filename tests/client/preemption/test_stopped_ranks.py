"""A rank whose process is stopped while the ranks agree on the step of a notice, and runs on later."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from types import SimpleNamespace

import pytest

from tierd.client.preemption import agreement
from tierd.client.preemption.agreement import NOTES_PATIENCE_S, Notice, StepAgreement

LATER_S = 4.0 + 3 * NOTES_PATIENCE_S  # when the process continues


class Board:
    """Notes that are read at once."""

    def __init__(self) -> None:
        self._notes: dict[str, bytes] = {}

    def put(self, key: str, value: bytes) -> None:
        self._notes[key] = value

    def read(self, keys: Collection[str]) -> dict[str, bytes]:
        return {key: self._notes[key] for key in keys if key in self._notes}


def stopped_behind_its_note(board: Board) -> list[StepAgreement]:
    """Two ranks that asked at step 10, and a word of rank 0 that rank 1 has not read."""
    ranks = [StepAgreement(number, 2, "m/") for number in range(2)]
    assert [one.due(10) for one in ranks] == [False, False]
    ranks[0].offer(Notice("SIGTERM", "SIGTERM", 0.0))
    for rank, now_s in ((0, 1.0), (1, 2.0), (1, 3.0), (0, 4.0)):
        ranks[rank].advance(board, now_s)
    assert ranks[0].due(11) and ranks[1].frozen_s is not None
    return ranks


def test_rank_that_was_stopped_obeys_a_note_that_was_published_meanwhile() -> None:
    board = Board()
    ranks = stopped_behind_its_note(board)
    ranks[1].advance(board, LATER_S)
    assert ranks[1].due(11) and not ranks[1].due(12), "as on rank 0"


def test_a_rank_that_cannot_read_gives_up_as_well(caplog) -> None:
    board = Board()
    ranks = stopped_behind_its_note(board)
    board.read = lambda keys: 1 // 0
    for second in range(int(2.5 * NOTES_PATIENCE_S)):
        with pytest.raises(ZeroDivisionError):
            ranks[1].advance(board, 4.0 + second)
        if ranks[1].frozen_s is None:
            break
    assert not ranks[1].due(11)
    assert "no word from rank 0" in caplog.text


def test_training_that_was_stopped_in_due_leaves_the_other_thread_time_to_read(monkeypatch) -> None:
    """The whole process was stopped in the first wait, and the other thread reads the word in the second."""
    board, ranks = Board(), list[StepAgreement]()
    waits: list[float] = []

    class Stopped(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            if not ranks:
                return super().wait(timeout)
            waits.append(timeout or 0.0)
            if len(waits) == 1:
                time.sleep(4 * agreement.NOTES_PATIENCE_S)
            else:
                ranks[1].advance(board, LATER_S)
            return True

    monkeypatch.setattr(agreement, "threading", SimpleNamespace(**{**vars(threading), "Condition": Stopped}))
    made = stopped_behind_its_note(board)
    monkeypatch.setattr(agreement, "NOTES_PATIENCE_S", 0.05)
    ranks += made
    assert ranks[1].due(11), "as on rank 0"
    assert len(waits) == 2


def advance_until_it_gives_up(rank: StepAgreement, board: Board, now_s: float) -> float:
    """Return the time at which `rank`, which polls twice a second, gave the turn up."""
    rank.advance(board, now_s)
    while rank.frozen_s is not None:
        now_s += 0.5
        rank.advance(board, now_s)
    return now_s


def answers(ranks: list[StepAgreement]) -> list[list[bool]]:
    """Each rank's answers at the next two steps."""
    return [[one.due(step) for step in (11, 12)] for one in ranks]


def noticed_by_rank_1() -> list[StepAgreement]:
    ranks = [StepAgreement(number, 2, "m/") for number in range(2)]
    assert [one.due(10) for one in ranks] == [False, False]
    ranks[1].offer(Notice("SIGTERM", "SIGTERM", 0.0))
    return ranks


def test_rank_0_publishes_no_step_after_a_rank_gave_up(caplog) -> None:
    """Rank 0 was stopped before it read that there is a notice."""
    board, ranks = Board(), noticed_by_rank_1()
    gave_up_s = advance_until_it_gives_up(ranks[1], board, 1.0)
    assert NOTES_PATIENCE_S < gave_up_s < 3 * NOTES_PATIENCE_S
    assert not ranks[1].due(11)
    for rank in (0, 0, 1):
        ranks[rank].advance(board, gave_up_s + 1.0)
    assert answers(ranks) == [[False, False], [False, False]]
    assert "rank 1 of 2 got no word from rank 0 for long" in caplog.text, "rank 0 says why"
    ranks[1].offer(Notice("SIGUSR1", "SIGUSR1", 100.0))
    for rank in (1, 0, 1):
        ranks[rank].advance(board, 100.0)
    assert [one.due(13) for one in ranks] == [True, True], "the next notice is agreed on"


def test_rank_0_reads_again_if_it_was_stopped_after_it_read(monkeypatch) -> None:
    """The other rank gave up between rank 0's look at the notes and its word."""
    board, ranks = Board(), noticed_by_rank_1()
    ranks[1].advance(board, 1.0)
    clock = [100.0]
    monkeypatch.setattr(agreement.time, "monotonic", lambda: clock[0])
    read = board.read

    def stopped_after(keys: Collection[str]) -> dict[str, bytes]:
        found = read(keys)
        if len(found) == 2:
            board.read = read
            clock[0] += advance_until_it_gives_up(ranks[1], board, 1.5)
        return found

    board.read = stopped_after
    for _ in range(2):
        ranks[0].advance(board, clock[0])
    assert ranks[0].frozen_s is None
    assert answers(ranks) == [[False, False], [False, False]]


def test_the_time_in_which_all_ranks_were_stopped_is_no_time_that_a_rank_waited() -> None:
    """The job is suspended before rank 0 has read that there is a notice, and rank 1 runs first afterwards."""
    board, ranks = Board(), noticed_by_rank_1()
    for rank, now_s in ((1, 1.0), (1, 1000.0), (1, 1000.5), (0, 1000.6), (1, 1001.0)):
        ranks[rank].advance(board, now_s)
    assert answers(ranks) == [[True, False], [True, False]]


def hanging(rank: StepAgreement, board: Board, monkeypatch) -> None:
    """Let the thread of `rank` that talks hang in a read until training has waited for it in vain."""
    read = board.read

    def hangs(keys: Collection[str]) -> dict[str, bytes]:
        found = read(keys)
        if rank.frozen_s is not None:
            board.read = read
            with monkeypatch.context() as patch:
                patch.setattr(agreement, "NOTES_PATIENCE_S", 0.01)
                assert not rank.due(11)
        return found

    board.read = hangs


@pytest.mark.parametrize("hangs", [0, 1])
def test_training_that_waited_in_vain_for_its_own_thread_leaves_no_rank_alone_with_a_step(hangs, monkeypatch) -> None:
    board, ranks = Board(), noticed_by_rank_1()
    ranks[1].advance(board, 1.0)
    hanging(ranks[hangs], board, monkeypatch)
    for rank in (hangs, hangs, 0, 1, 0, 1):
        ranks[rank].advance(board, 2.0)
    assert [one.frozen_s for one in ranks] == [None, None]
    assert answers(ranks) == [[False, False], [False, False]]
    ranks[1].offer(Notice("SIGUSR1", "SIGUSR1", 3.0))
    for rank in (1, 0, 1):
        ranks[rank].advance(board, 3.0)
    assert [one.due(13) for one in ranks] == [True, True], "no word of the turn before is read as this turn's"


def reading_takes(seconds: float, board: Board, monkeypatch) -> None:
    clock, read = [0.0], board.read

    def slowly(keys: Collection[str]) -> dict[str, bytes]:
        clock[0] += seconds
        return read(keys)

    board.read = slowly
    monkeypatch.setattr(agreement, "time", SimpleNamespace(monotonic=lambda: clock[0]))


@pytest.mark.parametrize(("world", "agree"), [(2, False), (900, True)])
def test_many_ranks_may_take_longer_to_read(world, agree, monkeypatch) -> None:
    board, ranks = Board(), [StepAgreement(rank, world) for rank in range(2)]
    for rank in ranks:
        rank.due(10)
    ranks[1].offer(Notice("SIGTERM", "SIGTERM", 0.0))
    ranks[1].advance(board, 1.0)
    (note,) = board.read(["notice/0/1"]).values()
    for rank in range(2, world):
        board.put(f"notice/0/{rank}", note)
    reading_takes(5.0, board, monkeypatch)
    ranks[0].advance(board, 2.0)
    assert (ranks[0].frozen_s is None) == agree


def test_a_slow_board_keeps_no_rank_from_the_word_that_there_is_no_step(monkeypatch) -> None:
    board, rank = Board(), StepAgreement(0, 2)
    rank.due(10)
    rank.offer(Notice("SIGTERM", "SIGTERM", 0.0))
    reading_takes(5.0, board, monkeypatch)
    for second in range(20):
        rank.advance(board, 1.0 + second)
    assert b"did not say where it is" in board.read(["notice/0/all"])["notice/0/all"]
