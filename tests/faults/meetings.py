"""Mutants of how ranks hear each other and restore together, which ordinary tests find."""

from __future__ import annotations

from faults.rounds import Mutant

_MEETING, _RANKS = "tierd/client/ranks/meeting.py", "pytest tests/client/ranks/test_ranks.py"
_FINDING, _SIGNS = "tierd/client/ranks/rendezvous.py", "tierd/client/ranks/signs.py"
_TESTS = "pytest tests/client/ranks/test_meeting.py"
_NODES = "pytest tests/client/ranks/test_ranks_on_nodes.py"

MEETINGS = (
    Mutant(
        "a rank that does something else is waited for without an end",
        _SIGNS,
        "        elif waited_s > self._late_s:\n",
        "        elif waited_s > 1e6:\n",
        f"{_TESTS} -k something_else",
    ),
    Mutant(
        "a rank that is stopped is waited for without an end",
        _SIGNS,
        "            if silent_s > meeting.silent_s:\n",
        "            if silent_s > 1e6:\n",
        f"{_TESTS} -k stopped_or_dies",
    ),
    Mutant(
        "what processes before left at a meeting is taken for that of the living",
        _FINDING,
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
        "tierd/client/ranks/launch.py",
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
        "tierd/client/restoring/consensus.py",
        "look.everything, look.only, look.best",
        "look.everything, look.best",
        f"{_RANKS} -k different_entries",
    ),
    Mutant(
        "ranks on one node have no way to talk without a group",
        "tierd/client/ranks/ranks.py",
        "        if all_here():\n",
        "        if False:\n",
        f"{_RANKS} -k slurm_step_on_one_node",
    ),
    Mutant(
        "ranks on several nodes have no way to talk without a group",
        "tierd/client/ranks/ranks.py",
        "if tier is not None and name is not None else None",
        "if False else None",
        f"{_NODES} -k 'slurm_step_on_two_nodes and file'",
    ),
    Mutant(
        "a note that is being replaced is believed",
        "tierd/client/ranks/tier_board.py",
        "        if zlib.crc32(data) != checksum:\n            return None\n",
        "",
        f"{_NODES} -k being_replaced",
    ),
    Mutant(
        "ranks that end leave what they said on the tier",
        _MEETING,
        """                self._board.forget(f"{self._name}/")\n""",
        "",
        f"{_NODES} -k requests",
    ),
    Mutant(
        "a daemon that was killed is not waited for",
        "tierd/client/ranks/tier_board.py",
        "                if time.monotonic() >= end_s:\n",
        "                if True:\n",
        f"{_NODES} -k daemon_that_was_killed",
    ),
    Mutant(
        "a node without a daemon has the other nodes wait",
        "tierd/client/attachment.py",
        "        if self._tiers is None:\n            raise",
        "        if self._tiers is None:\n            return None\n            raise",
        f"{_NODES} -k node_without_a_daemon",
    ),
    Mutant(
        "notes of launches that live are swept",
        "tierd/daemon/rank_notes.py",
        "            living.add(launch)\n",
        "            pass\n",
        f"{_NODES} -k were_killed_are_swept",
    ),
    Mutant(
        "notes of ranks that were killed stay for ever",
        "tierd/daemon/rank_notes.py",
        "        if since and abs(now_ms - int(since[1], 16)) < _STALE_MS:\n",
        "        if since:\n",
        f"{_NODES} -k were_killed_are_swept",
    ),
    Mutant(
        "a daemon that starts sweeps no notes",
        "tierd/daemon/tiers/tiers.py",
        "            await sweep_meetings(store, run)\n",
        "",
        f"{_NODES} -k starts_sweeps",
    ),
    Mutant(
        "what somebody removed from a board is waited for without an end",
        _SIGNS,
        "        if self._done(sign) and now",
        "        if False and now",
        f"{_TESTS} -k somebody_else_removed",
    ),
    Mutant(
        "a launch that saves on another node is not told of",
        "tierd/core/timeline/launches.py",
        "            found |= dict.fromkeys(rivals, SPOOL) | ({other: name} if rivals else {})\n",
        "",
        "pytest tests/spool/test_leases.py -k array_tasks_on",
    ),
    Mutant(
        "ranks of one launch that changed nodes count as rivals",
        "tierd/core/timeline/launches.py",
        "            if other in local:\n                continue\n",
        "",
        "pytest tests/spool/test_leases.py -k 'exchanged or array_tasks_on'",
    ),
    Mutant(
        "rank 0 ends before the others have read why",
        _MEETING,
        "            self._await_readers(heard.keys() - {0})\n",
        "            pass\n",
        f"{_TESTS} -k may_end_with_its_store",
    ),
    Mutant(
        "a rank whose hello was written over never says it again",
        _FINDING,
        "            if time.monotonic() - said > board.beat_s:",
        "            if said < 0 and time.monotonic() - said > board.beat_s:",
        f"{_TESTS} -k written_over",
    ),
    Mutant(
        "a rank that ended before it began is waited for as a late one",
        "tierd/client/ranks/processes.py",
        "        return self._expected - running\n",
        "        return set()\n",
        f"{_TESTS} -k 'before_it_began and killed'",
    ),
    Mutant(
        "a rank that is on another node counts as ended",
        "tierd/client/ranks/processes.py",
        "            if all_here() and self._launcher_is_visible(rank):\n",
        "            if self._launcher_is_visible(rank):\n",
        f"{_TESTS} -k before_it_began",
    ),
    Mutant(
        "a rank that imports its modules counts as ended",
        "tierd/client/ranks/processes.py",
        "        running = {rank for pid in pids if (rank := self._rank(pid)) is not None}\n",
        "        running = {self._rank(os.getpid())}\n",
        f"{_TESTS} -k 'before_it_began and slow'",
    ),
    Mutant(
        "other nodes do not learn that a rank has ended",
        _FINDING,
        """            board.put("gone", why.encode())\n""",
        "",
        f"{_TESTS} -k learn_that_a_rank",
    ),
)
