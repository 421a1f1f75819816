"""Mutants of what a terminal shows: tables, progress, `tierd top`, and the log of a daemon that a trainer started."""

from __future__ import annotations

from faults.rounds import Mutant

_LAYOUT, _TOP = "pytest tests/cli/test_layout.py", "pytest tests/cli/test_top.py"
_PROGRESS, _LOG = "pytest tests/cli/test_progress.py", "pytest tests/daemon/test_own_log.py"
_KNOWN = "pytest tests/cli/test_known.py"

TERMINALS = (
    Mutant(
        "layout: a line may be wider than the terminal",
        "tierd/cli/layout.py",
        "    if cell_len(cell) <= width:\n        return [cell]\n",
        "    return [cell]\n",
        f"{_LAYOUT} -k too_wide_and_no_text",
    ),
    Mutant(
        "layout: each copy repeats its checkpoint",
        "tierd/cli/layout.py",
        "        found += name if name != before else []\n",
        "        found += name\n",
        f"{_LAYOUT} -k name_their_thing_once",
    ),
    Mutant(
        "top: a daemon that ended ends it",
        "tierd/cli/reading/top.py",
        "        except DaemonUnavailable as error:\n            self.error = error\n",
        "        except DaemonUnavailable:\n            raise\n",
        f"{_TOP} -k lives_on_a_terminal",
    ),
    Mutant(
        "top: the terminal stays without echo",
        "tierd/cli/reading/top.py",
        "        termios.tcsetattr(fd, termios.TCSADRAIN, before)\n",
        "        pass\n",
        f"{_TOP} -k lives_on_a_terminal",
    ),
    Mutant(
        "runs: a rollback loses nothing",
        "tierd/core/timeline/launch_steps.py",
        "max(0, max(before) - int(step)) if before else 0",
        "0",
        f"{_TOP} -k one_answer_serves",
    ),
    Mutant(
        "flush: nobody learns how far it is",
        "tierd/daemon/transfer/flush.py",
        "                moved.done += held[1]\n",
        "",
        f"{_PROGRESS} -k tells_how_far",
    ),
    Mutant(
        "progress: nothing is shown where nothing is a terminal",
        "tierd/cli/progress.py",
        "                complain(self.line())\n",
        "                pass\n",
        f"{_PROGRESS} -k elsewhere",
    ),
    Mutant(
        "log: a daemon's log grows for ever",
        "tierd/daemon/service.py",
        "        stack.enter_context(bounded(spool.control))\n",
        "",
        f"{_LOG} -k the_daemon_bounds",
    ),
    Mutant(
        "log: any file of a standard error is renamed",
        "tierd/daemon/reports/own_log.py",
        "            return os.path.samestat(os.fstat(_ERR), self._path.lstat())\n",
        "            return True\n",
        f"{_LOG} -k another_file",
    ),
    Mutant(
        "a step that is unknown is answered with nothing",
        "tierd/cli/known.py",
        '    there = steps_there(step, steps) if step is not None else ""\n',
        '    there = ""\n',
        f"{_KNOWN} -k unknown_step",
    ),
    Mutant(
        "a fresh node's restore says that its spool is damaged",
        "tierd/client/restoring/source.py",
        "            if self._spool.has(part):\n",
        "            if True:\n",
        "pytest tests/client/restoring/test_progress.py -k not_whole",
    ),
    Mutant(
        "a trainer's progress stays on its terminal",
        "tierd/client/terminal_line.py",
        "                self._write(_ERASE)\n",
        "                pass\n",
        "pytest tests/client/test_terminal_line.py -k fails_leaves",
    ),
    Mutant(
        "every rank draws on the one terminal",
        "tierd/client/restoring/progress.py",
        "if self._part.rank == 0 and self._line",
        "if self._line",
        "pytest tests/client/test_terminal_line.py -k one_rank",
    ),
)
