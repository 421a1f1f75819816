"""A rank whose process is stopped while the ranks agree on the step of a notice, and runs on later."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection

import pytest

from tierd.client.preemption import agreement
from tierd.client.preemption.agreement import LATE_S, Agreement, Notice

LATER_S = 4.0 + 3 * LATE_S  # when the process continues


class Board:
    """Notes that are read at once."""

    def __init__(self) -> None:
        self._notes: dict[str, bytes] = {}

    def put(self, key: str, value: bytes) -> None:
        self._notes[key] = value

    def read(self, keys: Collection[str]) -> dict[str, bytes]:
        return {key: self._notes[key] for key in keys if key in self._notes}


def stopped_behind_its_note(board: Board) -> list[Agreement]:
    """Two ranks that asked at step 10, and a word of rank 0 that rank 1 has not read."""
    ranks = [Agreement(number, 2, "m/") for number in range(2)]
    assert [one.due(10) for one in ranks] == [False, False]
    ranks[0].offer(Notice("SIGTERM", "SIGTERM", 0.0))
    for rank, now_s in ((0, 1.0), (1, 2.0), (1, 3.0), (0, 4.0)):
        ranks[rank].advance(board, now_s)
    assert ranks[0].due(11) and ranks[1].frozen_s is not None
    return ranks


def test_a_rank_that_was_stopped_goes_by_a_word_that_was_published_meanwhile() -> None:
    board = Board()
    ranks = stopped_behind_its_note(board)
    ranks[1].advance(board, LATER_S)
    assert ranks[1].due(11) and not ranks[1].due(12), "as on rank 0"


def test_a_rank_that_cannot_read_gives_up_as_well(caplog) -> None:
    board = Board()
    ranks = stopped_behind_its_note(board)
    board.read = lambda keys: 1 // 0
    with pytest.raises(ZeroDivisionError):
        ranks[1].advance(board, LATER_S)
    assert ranks[1].frozen_s is None and not ranks[1].due(11)
    assert "no word from rank 0" in caplog.text


def test_training_that_was_stopped_in_due_leaves_the_other_thread_time_to_read(monkeypatch) -> None:
    """The whole process was stopped in the first wait, and the other thread reads the word in the second."""
    board = Board()
    ranks = stopped_behind_its_note(board)
    monkeypatch.setattr(agreement, "LATE_S", 0.05)
    waits: list[float] = []

    class Stopped(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            if len(waits) == 1:
                time.sleep(4 * agreement.LATE_S)
            else:
                ranks[1].advance(board, LATER_S)
            return True

    ranks[1]._changed = Stopped()
    assert ranks[1].due(11), "as on rank 0"
    assert len(waits) == 2
