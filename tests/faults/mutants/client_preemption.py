"""Mutants of `tierd/client/preemption/`."""

from __future__ import annotations

from faults.rounds import Mutant

_AGREEMENT = "tierd/client/preemption/agreement.py"
_CLOUDS = "tierd/client/preemption/clouds.py"
_SIGNALS = "tierd/client/preemption/signals.py"
_TEST_AGREEMENT = "pytest tests/client/preemption/test_agreement.py"
_TEST_CLOUDS = "pytest tests/client/preemption/test_clouds.py"
_TEST_STOPPED = "pytest tests/client/preemption/test_stopped_ranks.py"
_TEST_SIGNALS = "pytest tests/client/preemption/test_signals.py"

MUTANTS = (
    Mutant(
        "preemption: the rank that asked least decides the step",
        _AGREEMENT,
        "latest = max(Moment(",
        "latest = min(Moment(",
        f"{_TEST_AGREEMENT} -k thousand",
    ),
    Mutant(
        "preemption: a step that a rank has passed is due",
        _AGREEMENT,
        "self._asked > one.after]",
        "self._asked >= one.after]",
        f"{_TEST_AGREEMENT} -k asked_further",
    ),
    Mutant(
        "preemption: a second notice replaces one that another rank has met",
        _AGREEMENT,
        "                self._agreed.append(_Due(Moment(word.restores, word.step), word.why, since_s))",
        "                self._agreed = [_Due(Moment(word.restores, word.step), word.why, since_s)]",
        f"{_TEST_AGREEMENT} -k second_notice",
    ),
    Mutant(
        "preemption: a deadline counts from the later of two notices",
        _AGREEMENT,
        "self.since_s = min(met,",
        "self.since_s = max(met,",
        f"{_TEST_AGREEMENT} -k two_notices",
    ),
    Mutant(
        "preemption: every rank's copy of a notice counts",
        _AGREEMENT,
        "            word = _Word(latest.restores, latest.step, every, self._next[0])",
        "            word = _Word(latest.restores, latest.step, (), self._next[0])",
        f"{_TEST_AGREEMENT} -k same_notice",
    ),
    Mutant(
        "preemption: a notice before a restore is due at its old step",
        _AGREEMENT,
        "Moment(turn, -1)",
        "Moment(self._asked.restores, -1)",
        f"{_TEST_AGREEMENT} -k before_a_restore",
    ),
    Mutant(
        "preemption: each rank counts the restores that succeeded there",
        _AGREEMENT,
        "Moment(turn, -1)",
        "Moment(self._asked.restores + 1, -1)",
        f"{_TEST_AGREEMENT} -k failed_on_one_rank",
    ),
    Mutant(
        "preemption: a rank that is gone is waited for without end",
        _AGREEMENT,
        "        elif self._waited_s > self._late_s:",
        "        elif False:",
        f"{_TEST_AGREEMENT} -k is_gone",
    ),
    Mutant(
        "preemption: a rank that was stopped discards a published word",
        _AGREEMENT,
        "            if word is None and self._waited_s > self._end_s:",
        "            if now_s - (frozen_s or now_s) > 2 * self._late_s:",
        f"{_TEST_STOPPED} -k published_meanwhile",
    ),
    Mutant(
        "preemption: a rank that gives up leaves its note",
        _AGREEMENT,
        """            notes.put(self._key(question, str(self._rank)), b"")\n""",
        "",
        f"{_TEST_STOPPED} -k after_a_rank_gave_up",
    ),
    Mutant(
        "preemption: more ranks get no more time",
        _AGREEMENT,
        "LATE_S * max(1.0, self._world / _MANY)",
        "LATE_S",
        f"{_TEST_STOPPED} -k many_ranks",
    ),
    Mutant(
        "preemption: rank 0 says nothing of a rank that is gone if it reads for long",
        _AGREEMENT,
        "        elif not word.error and time",
        "        elif time",
        f"{_TEST_STOPPED} -k slow_board",
    ),
    Mutant(
        "preemption: rank 0 publishes by notes that it read long ago",
        _AGREEMENT,
        "time.monotonic() - read_s > self._late_s / 4:",
        "False:",
        f"{_TEST_STOPPED} -k reads_again",
    ),
    Mutant(
        "preemption: the time in which all ranks were stopped counts as waiting for rank 0",
        _AGREEMENT,
        "min(now_s - self._polled_s, self._late_s / 5 + self._seen_s)",
        "now_s - self._polled_s",
        f"{_TEST_STOPPED} -k all_ranks_were_stopped",
    ),
    Mutant(
        "preemption: rank 0 publishes a step of a turn that its training has ended",
        _AGREEMENT,
        "        if self._question != question:\n            word",
        "        if False:\n            word",
        f"{_TEST_STOPPED} -k in_vain",
    ),
    Mutant(
        "preemption: training that gives up leaves its rank's note",
        _AGREEMENT,
        "                self._owed = self._key(self._question, str(self._rank))\n",
        "",
        f"{_TEST_STOPPED} -k in_vain",
    ),
    Mutant(
        "preemption: the time in which a process was stopped counts as waiting",
        _AGREEMENT,
        "_WAITS = 30 ",
        "_WAITS = 1 ",
        f"{_TEST_STOPPED} -k stopped_in_due",
    ),
    Mutant(
        "preemption: another machine's event counts",
        _CLOUDS,
        " and self._me in one.resources",
        "",
        f"{_TEST_CLOUDS} -k azure",
    ),
    Mutant(
        "preemption: a live migration counts",
        _CLOUDS,
        '.text == "TERMINATE_ON_HOST_MAINTENANCE"',
        '.text != "NONE"',
        f"{_TEST_CLOUDS} -k compute_engine",
    ),
    Mutant(
        "preemption: an expired token is not renewed",
        _CLOUDS,
        "if answer.status == 401:",
        "if False:",
        f"{_TEST_CLOUDS} -k ec2",
    ),
    Mutant(
        "preemption: a metadata server is asked on every machine",
        _CLOUDS,
        "_detected(dmi) if asked else None",
        '(_detected(dmi) or "ec2") if asked else None',
        "pytest tests/client/preemption/test_notices.py -k nowhere_else",
    ),
    Mutant(
        "preemption: a forked worker outlives SIGTERM",
        _SIGNALS,
        "        elif before == signal.SIG_DFL and not any(",
        "        elif False and not any(",
        f"{_TEST_SIGNALS} -k forked",
    ),
    Mutant(
        "preemption: a program's own handler is not called any more",
        _SIGNALS,
        "        if callable(before):",
        "        if False:",
        f"{_TEST_SIGNALS} -k handler_of_before",
    ),
    Mutant(
        "preemption: the handlers stay after close",
        _SIGNALS,
        "            if signal.getsignal(number) == self._handle:",
        "            if False:",
        f"{_TEST_SIGNALS} -k until_close",
    ),
)
