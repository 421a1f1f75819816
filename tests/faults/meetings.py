"""Mutants of how ranks hear each other and restore together, which ordinary tests find."""

from __future__ import annotations

from faults.rounds import Mutant

_MEETING, _RANKS = "tierd/client/meeting.py", "pytest tests/client/test_ranks.py"
_TESTS = "pytest tests/client/test_meeting.py"

MEETINGS = (
    Mutant(
        "a rank that does something else is waited for without an end",
        _MEETING,
        "        elif waited_s > self._late_s:\n",
        "        elif waited_s > 1e6:\n",
        f"{_TESTS} -k something_else",
    ),
    Mutant(
        "a rank that is stopped is waited for without an end",
        _MEETING,
        "            if silent_s > meeting.silent_s:\n",
        "            if silent_s > 1e6:\n",
        f"{_TESTS} -k stopped_or_dies",
    ),
    Mutant(
        "what processes before left at a meeting is taken for that of the living",
        _MEETING,
        "and mates[self._rank] == self._me and",
        "and",
        f"{_TESTS} -k earlier_processes",
    ),
    Mutant(
        "a rank that works gives no sign of life",
        _MEETING,
        "self._jobs.get(timeout=self._board.beat_s if self._inside else _IDLE_S)",
        "self._jobs.get(timeout=_IDLE_S)",
        f"{_TESTS} -k works_is_waited",
    ),
    Mutant(
        "who gives up waiting leaves what it said to a late rank 0",
        _MEETING,
        '                self._put(f"{turn}/{self._rank}", b"")\n',
        "",
        f"{_TESTS} -k does_not_go_on_alone",
    ),
    Mutant(
        "a restore ends before every rank has loaded",
        "tierd/client/checkpointer.py",
        "            restorer.agreement.loaded(found.part.checkpoint, failure)\n",
        "            if failure:\n                raise failure\n",
        f"{_RANKS} -k cannot_load_no_rank",
    ),
    Mutant(
        "a launch saves although a rank could not load",
        "tierd/client/launch.py",
        "        if self._broken:\n",
        "        if False:\n",
        f"{_RANKS} -k cannot_load_no_rank",
    ),
    Mutant(
        "a process group that came later is not looked at",
        "tierd/client/checkpointer.py",
        "        self._ranks.check_group()\n",
        "",
        f"{_RANKS} -k came_later",
    ),
    Mutant(
        "ranks may be given different tiers",
        "tierd/client/checkpointer.py",
        '"to": self._daemon.to, ',
        "",
        f"{_RANKS} -k made_differently",
    ),
    Mutant(
        "ranks may want different entries",
        "tierd/client/agree.py",
        "look.everything, look.only, look.best",
        "look.everything, look.best",
        f"{_RANKS} -k different_entries",
    ),
    Mutant(
        "ranks on one node have no way to talk without a group",
        "tierd/client/ranks.py",
        "if spool is not None and _launched() == me and all_here():",
        "if False:",
        f"{_RANKS} -k slurm_step_on_one_node",
    ),
)
