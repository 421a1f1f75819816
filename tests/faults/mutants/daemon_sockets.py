"""Mutants of `tierd/daemon/`: its sockets, and the messages on them."""

from __future__ import annotations

from faults.rounds import Mutant

_CONTROL = "tierd/daemon/control.py"
_CONTROL_LINES = "tierd/daemon/control_lines.py"
_HANDOFF = "tierd/daemon/handoff.py"
_HANDOFF_LINES = "tierd/daemon/handoff_lines.py"
_TEST_CONTROL = "pytest tests/daemon/test_control.py"
_TEST_STOPPED_DAEMON = "pytest tests/client/saving/test_stopped_daemon.py"
_TEST_HANDOFF = "pytest tests/client/saving/test_handoff.py"
_TEST_MANY_CONNECTIONS = "pytest tests/client/saving/test_many_connections.py"

MUTANTS = (
    Mutant(
        "a hand-off that fails after its part is there is never an event",
        _HANDOFF,
        "            self._on_persisting(message.part, False)\n",
        "            pass\n",
        f"{_TEST_HANDOFF} -k before_its_hand_off_is_reported",
    ),
    Mutant(
        "nobody learns that a hand-off is being committed",
        "tierd/daemon/service.py",
        "reconciler.timings, persisting)",
        "reconciler.timings)",
        "pytest tests/end_to_end/test_metrics.py",
    ),
    Mutant(
        "a daemon of a deleted spool takes away another daemon's sockets",
        "tierd/spool/permissions.py",
        "            os.unlink(path.name, dir_fd=directory)",
        "            path.unlink()",
        "pytest tests/spool/test_permissions.py -k spool_that_was_deleted",
    ),
    Mutant(
        "control answers any user",
        _CONTROL,
        'if (uid := stranger(writer.get_extra_info("socket"))) is not None:',
        "if (uid := None) is not None:",
        "pytest tests/spool/test_permissions.py -k turns",
    ),
    Mutant(
        "a tier that does not answer is named and no more",
        "tierd/daemon/request_handler.py",
        "silent=self._located(silent, run_view.unreached)",
        "silent={}",
        "pytest tests/client/restoring/test_missing_tier.py -k missing_on_one_node",
    ),
    Mutant(
        "a fetch that fails does not say on which node",
        "tierd/daemon/request_handler.py",
        'raise type(error)(f"node {socket.gethostname()}: {error}") from error',
        "raise",
        "pytest tests/client/restoring/test_missing_tier.py -k only_that_tier_has",
    ),
    Mutant(
        "a wait tells what was left, not what was asked",
        "tierd/daemon/request_handler.py",
        "is not verified there yet{why}",
        "is not verified there after {timeout:g} s{why}",
        "pytest tests/cli/test_ending.py -k time_is_over",
    ),
    Mutant(
        "a restore waits for a slow tier however long that takes",
        "tierd/daemon/request_handler.py",
        "if patient or not local:",
        "if True:",
        "pytest tests/client/restoring/test_patience.py -k no_longer_than",
    ),
    Mutant(
        "a slow tier is not waited for though it may know of a newer checkpoint",
        "tierd/daemon/request_handler.py",
        "if patient or not local:",
        "if patient:",
        "pytest tests/client/restoring/test_patience.py -k waited_for",
    ),
    Mutant(
        "a daemon at work on room counts as stopped",
        _CONTROL,
        "messages.BEAT if isinstance(request, messages.MakeRoom | messages.Candidates) else math.inf",
        "math.inf",
        f"{_TEST_STOPPED_DAEMON} -k makes_room",
    ),
    Mutant(
        "a restore does not wait for what the dead had handed over",
        "tierd/daemon/request_handler.py",
        "                await self._handoff.settled()  # to include snapshots that a dead trainer handed over",
        "                pass",
        f"{_TEST_HANDOFF} -k restart_waits",
    ),
    Mutant(
        "a request of a later client ends its connection",
        _CONTROL,
        "                request = unknown(error)",
        "                raise",
        "pytest tests/wire/test_apart.py -k one_minor_version_later_is_answered",
    ),
    Mutant(
        "rm deletes a run that is being trained",
        "tierd/daemon/request_handler.py",
        "if reconciler.requests.is_trained(run):",
        "if False:",
        "pytest tests/cli/test_space.py -k refuses",
    ),
    Mutant(
        "hand-off takes any user's memory",
        _HANDOFF,
        "if (uid := stranger(connection)) is not None:",
        "if (uid := None) is not None:",
        "pytest tests/spool/test_permissions.py -k turns",
    ),
    Mutant(
        "descriptors of an empty packet stay open",
        _HANDOFF,
        "                if not self._answer(line, packet, fds):",
        "                if not packet or not self._answer(line, packet, fds):",
        f"{_TEST_HANDOFF} -k bad_message",
    ),
    Mutant(
        "what the dead sent behind an unread answer is dropped",
        _HANDOFF,
        "for _ in range(2):",
        "for _ in range(1):",
        f"{_TEST_HANDOFF} -k left_an_answer",
    ),
    Mutant(
        "the daemon drops the snapshot of a trainer that is gone",
        _HANDOFF,
        "message.part, line.arenas.get(message.slot)",
        "message.part, None if line.hung_up else line.arenas.get(message.slot)",
        f"{_TEST_HANDOFF} -k every_slot",
    ),
    Mutant(
        "a daemon at work on a snapshot counts as stopped",
        _HANDOFF,
        "timeout=messages.BEAT).done:",
        "timeout=messages.HEARTBEAT).done:",
        f"{_TEST_STOPPED_DAEMON} -k works_for_long",
    ),
    Mutant(
        "a daemon that wakes reports what its trainer wrote as failed",
        _HANDOFF,
        "            if not isinstance(error, StepRefused) and not self._spool.has(part):\n",
        "            if True:\n",
        f"{_TEST_STOPPED_DAEMON} -k meanwhile",
    ),
    Mutant(
        "a thread that cannot be had ends the hand-off",
        _HANDOFF,
        "        except RuntimeError as error:  # no more threads",
        "        except FileNotFoundError as error:  # no more threads",
        f"{_TEST_MANY_CONNECTIONS} -k cannot_be_had",
    ),
    Mutant(
        "the end of a daemon waits for the next trainer, or the next look",
        _HANDOFF,
        "os.eventfd_write(wake, 1)",
        "pass",
        "pytest tests/daemon/test_control.py -k ends_at_once",
    ),
    Mutant(
        "a request that is not valid ends its connection without a word",
        _CONTROL,
        "            if isinstance(error, msgspec.DecodeError):",
        "            if False:",
        f"{_TEST_CONTROL} -k of_no_length",
    ),
    Mutant(
        "a pause has any length",
        "tierd/ipc/messages.py",
        "Meta(gt=0, le=MAX_PAUSE)",
        "Meta(le=MAX_PAUSE)",
        f"{_TEST_CONTROL} -k of_no_length",
    ),
    Mutant(
        "the removal of a run that is not there is logged",
        "tierd/daemon/remove.py",
        "    return bool(found or parts or quarantined or pins or leftovers)",
        "    return True",
        f"{_TEST_CONTROL} -k removal_is_logged",
    ),
    Mutant(
        "as many control connections as anybody opens",
        _CONTROL_LINES,
        "    if len(counted) < MOST:",
        "    if True:",
        f"{_TEST_CONTROL} -k crowd",
    ),
    Mutant(
        "idle control connections keep their places",
        _CONTROL_LINES,
        "    if longest is None:",
        "    if True:",
        f"{_TEST_CONTROL} -k gives_way",
    ),
    Mutant(
        "a trainer's control connection gives way",
        _CONTROL_LINES,
        "self.working or self.held or self.attached)",
        "self.working or self.held)",
        f"{_TEST_CONTROL} -k gives_way",
    ),
    Mutant(
        "a control connection that works gives way",
        _CONTROL_LINES,
        "self.working or self.held or self.attached)",
        "self.held or self.attached)",
        f"{_TEST_CONTROL} -k gives_way",
    ),
    Mutant(
        "a client whose connection was refused does not read why",
        "tierd/ipc/client.py",
        "        except ConnectionError:\n            pass  # the daemon closed",
        "        except FileNotFoundError:\n            pass  # the daemon closed",
        f"{_TEST_CONTROL} -k closed_before",
    ),
    Mutant(
        "as many threads as anybody connects",
        _HANDOFF_LINES,
        "    if len(counted) < MOST:",
        "    if True:",
        f"{_TEST_MANY_CONNECTIONS} -k refused_by_name",
    ),
    Mutant(
        "idle connections keep their places",
        _HANDOFF_LINES,
        "    if not idle:",
        "    if True:",
        f"{_TEST_MANY_CONNECTIONS} -k beside_a_crowd",
    ),
    Mutant(
        "who lent something gives way as soon as who did not",
        _HANDOFF_LINES,
        "(bool(line.arenas), line.heard)",
        "(not line.arenas, line.heard)",
        f"{_TEST_MANY_CONNECTIONS} -k gives_way_last",
    ),
    Mutant(
        "who gives way counts as dead",
        _HANDOFF_LINES,
        "        self.left = self.ending = True",
        "        self.ending = True",
        f"{_TEST_MANY_CONNECTIONS} -k gives_way_last",
    ),
    Mutant(
        "a run counts as finished while a trainer may save it",
        "tierd/daemon/presence.py",
        "if self._attached[None]:",
        "if False:",
        "pytest tests/daemon/test_presence.py -k not_say",
    ),
    Mutant(
        "the wall clock alone says that a run is finished",
        "tierd/daemon/presence.py",
        "        return min(now - self._seen.get(run, self._begun if newest is None else -math.inf), part_s)\n",
        "        return part_s\n",
        "pytest tests/daemon/test_presence.py -k both_its_trainer",
    ),
)
