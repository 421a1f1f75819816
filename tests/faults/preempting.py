"""Mutants of preemption: on which step ranks agree, whose signals are taken, whose notices count, and what is sent
first."""

from __future__ import annotations

from faults.rounds import Mutant

_TESTS = "pytest tests/client/preemption/"
_AGREEMENT, _CLOUDS, _SIGNALS = (f"tierd/client/preemption/{name}.py" for name in ("agreement", "clouds", "signals"))

PREEMPTING = (
    Mutant(
        "preemption: the rank that asked least decides the step",
        _AGREEMENT,
        "latest = max(Moment(",
        "latest = min(Moment(",
        f"{_TESTS}test_agreement.py -k thousand",
    ),
    Mutant(
        "preemption: a step that a rank has passed is due",
        _AGREEMENT,
        "self._asked > self._after:",
        "self._asked >= self._after:",
        f"{_TESTS}test_agreement.py -k asked_further",
    ),
    Mutant(
        "preemption: every rank's copy of a notice counts",
        _AGREEMENT,
        "            word = _Word(latest.restores, latest.step, every, self._next[0])",
        "            word = _Word(latest.restores, latest.step, (), self._next[0])",
        f"{_TESTS}test_agreement.py -k same_notice",
    ),
    Mutant(
        "preemption: a notice before a restore is due at its old step",
        _AGREEMENT,
        "Moment(self._asked.restores + 1, -1)",
        "Moment(self._asked.restores, -1)",
        f"{_TESTS}test_agreement.py -k before_a_restore",
    ),
    Mutant(
        "preemption: a rank that is gone is waited for without end",
        _AGREEMENT,
        "            if now_s - frozen_s <= LATE_S:",
        "            if True:",
        f"{_TESTS}test_agreement.py -k is_gone",
    ),
    Mutant(
        "preemption: a forked worker outlives SIGTERM",
        _SIGNALS,
        "        elif before == signal.SIG_DFL and not any(",
        "        elif False and not any(",
        f"{_TESTS}test_signals.py -k forked",
    ),
    Mutant(
        "preemption: a program's own handler is not called any more",
        _SIGNALS,
        "        if callable(before):",
        "        if False:",
        f"{_TESTS}test_signals.py -k handler_of_before",
    ),
    Mutant(
        "preemption: the handlers stay after close",
        _SIGNALS,
        "            if signal.getsignal(number) == self._handle:",
        "            if False:",
        f"{_TESTS}test_signals.py -k until_close",
    ),
    Mutant(
        "preemption: another machine's event counts",
        _CLOUDS,
        " and self._me in one.resources",
        "",
        f"{_TESTS}test_clouds.py -k azure",
    ),
    Mutant(
        "preemption: a live migration counts",
        _CLOUDS,
        '.text == "TERMINATE_ON_HOST_MAINTENANCE"',
        '.text != "NONE"',
        f"{_TESTS}test_clouds.py -k compute_engine",
    ),
    Mutant(
        "preemption: an expired token is not renewed",
        _CLOUDS,
        "if answer.status == 401:",
        "if False:",
        f"{_TESTS}test_clouds.py -k ec2",
    ),
    Mutant(
        "preemption: a metadata server is asked on every machine",
        _CLOUDS,
        "_detected(dmi) if asked else None",
        '(_detected(dmi) or "ec2") if asked else None',
        f"{_TESTS}test_notices.py -k nowhere_else",
    ),
    Mutant(
        "preemption: the last save is skipped where another is under way",
        "tierd/client/checkpointer.py",
        " and not self._choice.is_urgent(save.step)",
        "",
        f"{_TESTS}test_notices.py -k what_is_busy",
    ),
    Mutant(
        "preemption: the deadline begins with the close",
        "tierd/client/schedule.py",
        "(self.preemption.begun_s() if self.preemption is not None else time.monotonic())",
        "time.monotonic()",
        f"{_TESTS}test_notices.py -k counts_from",
    ),
    Mutant(
        "preemption: an older flush that is under way is finished first",
        "tierd/daemon/reconciling/flusher.py",
        "                task.cancel()",
        "                pass",
        f"{_TESTS}test_notices.py -k gives_way",
    ),
    Mutant(
        "preemption: the usual order of flushes stays",
        "tierd/core/planning/order.py",
        "    if newest_first:\n",
        "    if False:\n",
        "pytest tests/core/planning/test_order.py",
    ),
    Mutant(
        "preemption: nothing is counted for the steps in hand",
        "tierd/core/advice/notice.py",
        " + 2 * step_s",
        "",
        "pytest tests/cli/test_advise.py -k in_json_without",
    ),
)
