"""Mutants of `tierd/cli/reading/`."""

from __future__ import annotations

from faults.rounds import Mutant

_STATUS = "tierd/cli/reading/status.py"

MUTANTS = (
    Mutant(
        "an export collects no garbage",
        "tierd/cli/uncollected.py",
        "            gc.enable()\n",
        "            pass\n",
        "pytest tests/reading/test_export.py -k corrupt_checkpoint_is_skipped",
    ),
    Mutant(
        "a follower that only looks once does so at no run",
        "tierd/cli/reading/follow.py",
        "(check_known if once else note_unknown)",
        "note_unknown",
        "pytest tests/cli/test_known.py -k unknown_run",
    ),
    Mutant(
        "a follower that was started before the run's first save ends",
        "tierd/cli/reading/follow.py",
        "(check_known if once else note_unknown)",
        "check_known",
        "pytest tests/reading/test_follow.py -k begins_later",
    ),
    Mutant(
        "ls of a run that no place has ends with 0",
        "tierd/cli/reading/read.py",
        "missing = run is not None and not found.checkpoints and",
        "missing = False and",
        "pytest tests/cli/test_known.py -k unknown_run",
    ),
    Mutant(
        "doctor opens a tier as a daemon does, and marks it",
        "tierd/cli/reading/doctor.py",
        "attempts=_ATTEMPTS, trial=True)",
        "attempts=_ATTEMPTS)",
        "pytest tests/cli/test_doctor.py -k left_as_it_was",
    ),
    Mutant(
        "a path that is not there hides what was found",
        "tierd/cli/reading/inspect.py",
        "            absent.append(error)\n",
        "            raise\n",
        "pytest tests/watching/test_inspect.py -k hides_no_result",
    ),
    Mutant(
        "ls takes a silent daemon for none",
        "tierd/cli/reading/read.py",
        "            unanswered = True\n",
        "",
        "pytest tests/daemon/test_control.py -k ls_shows_the_spool",
    ),
    Mutant(
        "a member that an old daemon does not send ends `status`",
        _STATUS,
        '        return "unknown"',
        "        raise",
        "pytest tests/wire/test_apart.py -k status_of_an_old_daemon",
    ),
    Mutant(
        "status --check exits with 0 during an alert",
        _STATUS,
        'raise typer.Exit(EXIT_ALERT if "alert" in severities else EXIT_WARNING)',
        "raise typer.Exit(0)",
        "pytest tests/cli/test_status.py -k exits_by_severity",
    ),
    Mutant(
        "status --check takes a state of the past for an answer",
        _STATUS,
        "_answer(found.spool, last=not check)",
        "_answer(found.spool, last=True)",
        "pytest tests/cli/test_status.py -k last_state_is_shown",
    ),
    Mutant(
        "top: a daemon that ended ends it",
        "tierd/cli/reading/top.py",
        "        except DaemonUnavailable as error:\n            self.error = error\n",
        "        except DaemonUnavailable:\n            raise\n",
        "pytest tests/cli/test_top.py -k lives_on_a_terminal",
    ),
    Mutant(
        "top: the terminal stays without echo",
        "tierd/cli/reading/top.py",
        "        termios.tcsetattr(fd, termios.TCSADRAIN, before)\n",
        "        pass\n",
        "pytest tests/cli/test_top.py -k lives_on_a_terminal",
    ),
)
