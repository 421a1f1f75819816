"""Mutants of `tierd/client/ranks/`."""

from __future__ import annotations

from faults.rounds import Mutant

_MEETING = "tierd/client/ranks/note_exchange.py"
_RENDEZVOUS = "tierd/client/ranks/rendezvous.py"
_SIGNS = "tierd/client/ranks/signs.py"
_TEST_MEETING = "pytest tests/client/ranks/test_note_exchange.py"
_TEST_RANKS_ON_NODES = "pytest tests/client/ranks/test_ranks_on_nodes.py"

MUTANTS = (
    Mutant(
        "a launch follows a clock that is set forward",
        "tierd/client/ranks/launch_clock.py",
        "            wall = due\n",
        "            pass\n",
        "pytest tests/client/ranks/test_launch_clock.py",
    ),
    Mutant(
        "a launch follows a clock that is set forward after it was set back",
        "tierd/client/ranks/launch_clock.py",
        "        self._base = wall, elapsed\n",
        "",
        "pytest tests/client/ranks/test_launch_clock.py -k set_makes",
    ),
    Mutant(
        "a signal handler that closes waits for the talk that it interrupted",
        _MEETING,
        "        self._lock = threading.RLock() ",
        "        self._lock = threading.Lock() ",
        f"{_TEST_MEETING} -k handler_closes",
    ),
    Mutant(
        "a rank that works gives no sign of life",
        _MEETING,
        "self._jobs.get(timeout=self._board.beat_s if self._inside else _IDLE_S)",
        "self._jobs.get(timeout=_IDLE_S)",
        f"{_TEST_MEETING} -k works_is_waited",
    ),
    Mutant(
        "who gives up waiting leaves what it said to a late rank 0",
        _MEETING,
        '                self._put(f"{number}/{self._rank}", b"")\n',
        "",
        f"{_TEST_MEETING} -k does_not_go_on_alone",
    ),
    Mutant(
        "ranks that end leave what they said on the tier",
        _MEETING,
        """                self._board.forget(f"{self._name}/")\n""",
        "",
        f"{_TEST_RANKS_ON_NODES} -k requests",
    ),
    Mutant(
        "rank 0 ends before the others have read why",
        _MEETING,
        "            self._await_readers(heard.keys() - {0})\n",
        "            pass\n",
        f"{_TEST_MEETING} -k may_end_with_its_store",
    ),
    Mutant(
        "rank 0 alone fails where it cannot clear notes away",
        _MEETING,
        "        self._afterwards(lambda: self._board.remove(gone))\n",
        "        self._board.remove(gone)\n",
        f"{_TEST_MEETING} -k clears_away",
    ),
    Mutant(
        "rank 0 that was stopped goes on alone",
        _MEETING,
        "time.monotonic() - closed > self.silent_s / 2:",
        "time.monotonic() - closed > 1e6:",
        f"{_TEST_MEETING} -k stopped_before_its_answer",
    ),
    Mutant(
        "ranks on one node have no way to talk without a group",
        "tierd/client/ranks/ranks.py",
        "        if all_here():\n",
        "        if False:\n",
        "pytest tests/client/ranks/test_rank_processes.py -k slurm_step_on_one_node",
    ),
    Mutant(
        "ranks on several nodes have no way to talk without a group",
        "tierd/client/ranks/ranks.py",
        "if tier is not None and name is not None else None",
        "if False else None",
        f"{_TEST_RANKS_ON_NODES} -k 'slurm_step_on_two_nodes and file'",
    ),
    Mutant(
        "what processes before left at a meeting is taken for that of the living",
        _RENDEZVOUS,
        "and mates[self._rank] == self._me and",
        "and",
        f"{_TEST_MEETING} -k earlier_processes",
    ),
    Mutant(
        "a rank whose hello was written over never says it again",
        _RENDEZVOUS,
        "            if time.monotonic() - said > board.beat_s:",
        "            if said < 0 and time.monotonic() - said > board.beat_s:",
        f"{_TEST_MEETING} -k written_over",
    ),
    Mutant(
        "other nodes do not learn that a rank has ended",
        _RENDEZVOUS,
        """            board.put("gone", why.encode())\n""",
        "",
        f"{_TEST_MEETING} -k learn_that_a_rank",
    ),
    Mutant(
        "a rank that does something else is waited for without an end",
        _SIGNS,
        "        elif waited_s > self._late_s:\n",
        "        elif waited_s > 1e6:\n",
        f"{_TEST_MEETING} -k something_else",
    ),
    Mutant(
        "a rank that is stopped is waited for without an end",
        _SIGNS,
        "            if silent_s > exchange.silent_s:\n",
        "            if silent_s > 1e6:\n",
        f"{_TEST_MEETING} -k stopped_or_dies",
    ),
    Mutant(
        "what somebody removed from a board is waited for without an end",
        _SIGNS,
        "        if self._done(sign) and now",
        "        if False and now",
        f"{_TEST_MEETING} -k somebody_else_removed",
    ),
    Mutant(
        "a note that is being replaced is believed",
        "tierd/client/ranks/tier_board.py",
        "        if zlib.crc32(data) != checksum:\n            return None\n",
        "",
        f"{_TEST_RANKS_ON_NODES} -k being_replaced",
    ),
    Mutant(
        "a daemon that was killed is not waited for",
        "tierd/client/ranks/tier_board.py",
        "                if time.monotonic() >= end_s:\n",
        "                if True:\n",
        f"{_TEST_RANKS_ON_NODES} -k daemon_that_was_killed",
    ),
)
