"""Mutants of `tierd/client/`."""

from __future__ import annotations

from faults.rounds import Mutant

_ATTACHMENT = "tierd/client/attachment.py"
_COMPOSITION = "tierd/client/composition.py"
_STATE_RESTORER = "tierd/client/restoring/state_restorer.py"
_TEST_CLOSING = "pytest tests/client/test_closing.py"
_TEST_RANKS = "pytest tests/client/ranks/test_ranks.py"

MUTANTS = (
    Mutant(
        "a daemon that was stopped hears of the tiers of a launch only at its next save",
        _ATTACHMENT,
        "        if self._silence and not self._is_silent():\n",
        "        if False:\n",
        "pytest tests/daemon/test_launch_tiers.py -k 'stopped_takes and False'",
    ),
    Mutant(
        "a launch closes without telling a daemon that woke of its tiers",
        "tierd/client/shutdown.py",
        "            parts.daemon.renew(_WAKING_S)  # a daemon that woke",
        "            # a daemon that woke",
        "pytest tests/daemon/test_launch_tiers.py -k 'stopped_takes and True'",
    ),
    Mutant(
        "a signal handler that closes waits for the registration that it interrupted",
        _ATTACHMENT,
        "        self._lock = threading.RLock() ",
        "        self._lock = threading.Lock() ",
        f"{_TEST_CLOSING} -k handler_renews",
    ),
    Mutant(
        "nobody is told that no tier accepts checkpoints",
        "tierd/client/acceptance.py",
        "            asked = True\n",
        "            continue\n",
        f"{_TEST_CLOSING} -k mistyped",
    ),
    Mutant(
        "no launch begins beside a stopped daemon",
        _ATTACHMENT,
        "            except DaemonSilent as error:\n                self._warn(error)\n            self._watch",
        "            except ZeroDivisionError as error:\n                self._warn(error)\n            self._watch",
        "pytest tests/client/restoring/test_silent_daemon.py -k closing_waits",
    ),
    Mutant(
        "a daemon that woke is not attached to",
        _ATTACHMENT,
        "return not link.heard() if link",
        "return True if link",
        "pytest tests/client/restoring/test_silent_daemon.py -k when_it_wakes",
    ),
    Mutant(
        "a node without a daemon has the other nodes wait",
        _ATTACHMENT,
        "        if self._tiers is None:\n            raise",
        "        if self._tiers is None:\n            return None\n            raise",
        "pytest tests/client/ranks/test_ranks_on_nodes.py -k node_without_a_daemon",
    ),
    Mutant(
        "a named tier is not waited for",
        "tierd/client/shutdown.py",
        "                closing.wait_for(wait, timeout)",
        "                pass",
        f"{_TEST_CLOSING} -k named_tier",
    ),
    Mutant(
        "a restore ends before every rank has loaded",
        _STATE_RESTORER,
        "        restorer.agreement.loaded(found.part.checkpoint, failure)\n",
        "        if failure:\n            raise failure\n",
        f"{_TEST_RANKS} -k cannot_load_no_rank",
    ),
    Mutant(
        "a process group that came later is not looked at",
        _COMPOSITION,
        "        self.ranks.check_group()\n",
        "",
        f"{_TEST_RANKS} -k came_later",
    ),
    Mutant(
        "a later launch forgets what its run started from",
        _STATE_RESTORER,
        "                self._launch.started_from = found.manifest.started_from\n",
        "",
        "pytest tests/end_to_end/test_lineage.py -k over_its_launches",
    ),
    Mutant(
        "preemption: the last save is skipped where another is under way",
        "tierd/client/saving/state_saver.py",
        " and not self._schedule.is_urgent(save.step)",
        "",
        "pytest tests/client/preemption/test_notices.py -k what_is_busy",
    ),
    Mutant(
        "ranks may be given different tiers",
        _COMPOSITION,
        '"to": self.daemon.to, ',
        "",
        f"{_TEST_RANKS} -k made_differently",
    ),
    Mutant(
        "a daemon that ends with its container is trusted to flush",
        "tierd/client/outliving.py",
        "    return pid != 0 and namespace_ends_with_us()",
        "    return False",
        f"{_TEST_CLOSING} -k other_end",
    ),
    Mutant(
        "a repetition across a resume is not noticed",
        "tierd/client/sample_watch.py",
        'self._seen = set(state["seen"].tolist())',
        "self._seen = set()",
        "pytest tests/check/test_leakage.py -k resume_that_repeats",
    ),
    Mutant(
        "any object is a When",
        "tierd/client/schedule.py",
        "if when is not None and not isinstance(when, When):",
        "if False:",
        "pytest tests/end_to_end/test_run_policies.py -k each_argument",
    ),
    Mutant(
        "a signal handler that saves waits for the schedule that it has interrupted",
        "tierd/client/schedule.py",
        " = queue.SimpleQueue()",
        " = queue.Queue()",
        "pytest tests/client/test_schedule.py -k at_any_line",
    ),
    Mutant(
        "preemption: the deadline begins with the close",
        "tierd/client/schedule.py",
        "(self.preemption.begun_s() if self.preemption is not None else time.monotonic())",
        "time.monotonic()",
        "pytest tests/client/preemption/test_notices.py -k counts_from",
    ),
    Mutant(
        "a trainer's progress stays on its terminal",
        "tierd/client/terminal_line.py",
        "                self._write(_ERASE)\n",
        "                pass\n",
        "pytest tests/client/test_terminal_line.py -k fails_leaves",
    ),
)
