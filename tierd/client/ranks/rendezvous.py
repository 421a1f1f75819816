"""How the processes of a launch find each other: `hello`, `welcome` and `here` on the board (`note_exchange.py`)."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any

import msgspec

from tierd.client.ranks.board import Board
from tierd.client.ranks.processes import RankProcess, Siblings

log = logging.getLogger("tierd")

QUICK_S = 0.002  # the first pause between two reads of a note


class Absent(Exception):
    """Some ranks did not arrive in time."""


class Rendezvous:
    """One rank's search for the other ranks.

    Args:
        me: this process.
        silent_s: seconds after which a warning names the ranks that are missing. Also how long a rank may have no
            process on this node, because something may start it again.
        pause: sleeps for the given seconds and returns the length of the next pause.
    """

    def __init__(
        self, board: Board, me: RankProcess, rank: int, world: int, silent_s: float, pause: Callable[[float], float]
    ) -> None:
        self._board, self._me, self._rank, self._world = board, me, rank, world
        self._silent_s, self._pause = silent_s, pause
        self._siblings = Siblings(rank, world)
        self._ended_since: dict[int, float] = {}  # by rank: when it was first seen to have no process any more

    def find(self, late_s: float) -> list[RankProcess]:
        """Return the processes that are this launch's ranks now, in order of rank.

        Raises:
            Absent: some ranks did not arrive within `late_s` seconds, or ended before; the message names them.
        """
        board, start_s, pause_s, warned = self._board, time.monotonic(), QUICK_S, False
        hello_s = -math.inf
        while True:
            # Repeated, because a process of an earlier launch that is about to end may overwrite it.
            if time.monotonic() - hello_s > board.beat_s:
                board.put(f"hello/{self._rank}", msgspec.json.encode(self._me))
                hello_s = time.monotonic()
                self._check_ended()
            mates = self._hellos() if self._rank == 0 else self._welcome()
            if mates and None not in mates and mates[self._rank] == self._me and self._have_all_arrived(mates):
                return mates
            waited_s = time.monotonic() - start_s
            if waited_s > late_s:
                raise Absent(f"{self._missing(mates)} within {late_s:g} s ({board.what})")
            if waited_s > self._silent_s and not warned:
                warned = True
                log.warning("rank %d waits for the others: %s", self._rank, self._missing(mates))
            pause_s = self._pause(pause_s)

    def _check_ended(self) -> None:
        """Raise `Absent` if some rank has ended. The other nodes' ranks find the reason on the board."""
        board, now = self._board, time.monotonic()
        reason = board.get("gone") if board.exclusive else None
        if reason is not None:
            raise Absent(reason.decode())
        self._ended_since = {rank: self._ended_since.get(rank, now) for rank in self._siblings.ended()}
        ended_ranks = sorted(rank for rank, since in self._ended_since.items() if now - since > self._silent_s)
        if not ended_ranks:
            return
        why = (
            f"{_listed(ended_ranks)} of {self._world} ended before all had begun: no such process is left on "
            f"{self._me.host}"
        )
        if board.exclusive:
            board.put("gone", why.encode())
            if self._rank == 0:  # this process may end now, and the store with it
                time.sleep(2 * board.beat_s)
        raise Absent(why)

    def _missing(self, mates: list[Any]) -> str:
        """Describe the missing ranks, for messages. `mates` are the known ranks; empty if rank 0 was not found."""
        if not mates:
            return "rank 0 did not come"
        departed = [
            f"rank {rank} ({mate}) has ended"
            for rank, mate in enumerate(mates)
            if mate and mate.has_ended(self._me.scope)
        ]
        absent = [rank for rank, mate in enumerate(mates) if mate is None]
        if not absent and not departed and self._rank == 0:
            present = self._read_arrived(mates[0].token)
            absent = [rank for rank in range(1, self._world) if rank not in present]
        absent_text = [f"{_listed(absent)} of {self._world} did not come"] if absent else []
        return "; ".join(departed + absent_text) or "not all saw each other"

    def _hellos(self) -> list[Any]:
        """On rank 0: read which ranks are there, and publish them once all are."""
        notes = self._board.read([f"hello/{rank}" for rank in range(self._world)])
        hellos = [notes.get(f"hello/{rank}") for rank in range(self._world)]
        mates = [None if hello is None else msgspec.json.decode(hello, type=RankProcess) for hello in hellos]
        # At each read, because a rank 0 of an earlier launch that is about to end may overwrite it.
        if None not in mates:
            self._board.put("welcome", msgspec.json.encode(mates))
        return mates

    def _welcome(self) -> list[Any]:
        note = self._board.get("welcome")
        mates = [] if note is None else msgspec.json.decode(note, type=list[RankProcess])
        return mates if len(mates) == self._world else []

    def _have_all_arrived(self, mates: list[RankProcess]) -> bool:
        """Whether every rank has seen itself among `mates`. A rank other than 0 notes this for itself."""
        token = mates[0].token
        if self._rank:
            self._board.put(f"{token}/here/{self._rank}", b"1")
            return True
        return len(self._read_arrived(token)) == self._world - 1

    def _read_arrived(self, token: str) -> set[int]:
        """Return the ranks that have read rank 0's welcome."""
        keys = {f"{token}/here/{rank}": rank for rank in range(1, self._world)}
        return {keys[key] for key in self._board.read(keys.keys())}


def _listed(ranks: list[int]) -> str:
    listing = ", ".join(map(str, ranks[:10])) + (f" and {len(ranks) - 10} more" if len(ranks) > 10 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {listing}"
