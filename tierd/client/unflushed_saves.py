"""The saves of this launch that no tier has yet: a `Checkpointer` that closes waits for them, or warns of them.

Invariant: a plain close waits for tiers only if the daemon ends with this process or with the node; otherwise the
daemon flushes on alone. It ends with this process if that is the first one of a pid namespace (a container's PID 1),
because the kernel then kills every other process in it.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tierd.client.client_timings import USUAL_TIMINGS, ClientTimings
from tierd.client.user_messages import TerminalLine, transfer_rate_text
from tierd.core.errors import ConfigError, DaemonUnavailable, SaveFailed, StoreRefused, TierdError
from tierd.core.ids import PartId
from tierd.core.planning.place import SPOOL
from tierd.core.planning.unflushed_parts import UnflushedPart, UnflushedParts, parse_backlog
from tierd.core.units import pause_text
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.ipc.messages import BacklogRequest as AskBacklog
from tierd.spool.spool import Spool

_FIRST_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO: the inode of the machine's own pid namespace
_DEPTH = 100  # ancestors that are read at most
# Commands that, as PID 1 of a container, outlive the processes started in it.
_LASTING = {"systemd", "init", "s6-svscan", "runsvdir", "supervisord", "pause", "sleep", "tail"}
_SHELLS = {"sh", "bash", "dash", "ash", "zsh", "ksh"}


def ends_with_us(connection: socket.socket) -> bool:
    """Whether the process at the other end of a unix socket ends when this one ends.

    The kernel translates its pid to this namespace: 0 for a process of another one, which lives on.
    """
    answer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", answer)[0]
    return pid != 0 and namespace_ends_with_us()


def namespace_ends_with_us() -> bool:
    pid = os.getpid()
    try:
        own_namespace = Path("/proc/self/ns/pid").stat().st_ino != _FIRST_NAMESPACE
        first = Path("/proc/1/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
        return would_end(pid, _ancestors(pid), first, own_namespace=own_namespace)
    except (OSError, ValueError):  # no /proc, or another user's: answer only what is certain
        return pid == 1


def would_end(pid: int, ancestors: Sequence[int], first: Sequence[str], *, own_namespace: bool) -> bool:
    """Whether PID 1 of the namespace ends with process `pid`.

    Args:
        ancestors: the pids of its parent, its parent's parent, and so on, as far as they are in the namespace.
        first: the command line of PID 1.
        own_namespace: whether the namespace is another one than the machine's own.
    """
    if pid == 1:
        return True
    if not own_namespace or 1 not in ancestors or not first:
        return False  # PID 1 did not start this process, as with `docker exec`
    name = first[0].rsplit("/", 1)[-1].removeprefix("-")
    if name in _SHELLS:  # an interactive shell lives on; a shell that runs a command or a script does not
        flags = [word for word in first[1:] if word.startswith("-")]
        return len(flags) < len(first) - 1 or any("c" in flag for flag in flags if not flag.startswith("--"))
    return name not in _LASTING


def _ancestors(pid: int) -> list[int]:
    ancestors: list[int] = []
    while pid > 1 and len(ancestors) < _DEPTH:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        ancestors.append(pid)
    return ancestors


log = logging.getLogger("tierd")

LAST_FLUSH_S = 600.0  # how long a plain close waits for tiers if the daemon ends with this process
_ANSWER_S = 10.0  # how long the daemon may take to answer a question
_SOON_S = 3.0  # how long a plain close waits for the daemon's first answer
_LEAST_S = 0.25  # how long a question may take if no time is left
_LISTED_STEPS = 10  # steps that a message names


class UnflushedSaves:
    """The saves of one launch that are not on every tier yet, as the daemon reports them.

    Args:
        renew: makes sure that a daemon runs, if one was asked for.
        silent: returns why a daemon that runs cannot be asked, with the way out; empty if it can.
        node_ends: whether the node ends soon, and the daemon with it.
    """

    def __init__(
        self,
        spool: Spool,
        has_saved: Callable[[PartId], bool],
        renew: Callable[[], None],
        silent: Callable[[], str] = str,
        *,
        node_ends: bool = False,
        timings: ClientTimings = USUAL_TIMINGS,
    ) -> None:
        self._timings = timings
        self._spool, self._has_saved, self._renew, self._node_ends = spool, has_saved, renew, node_ends
        self._silent = silent
        self._ends_with_us = node_ends

    def wait_for(self, tier: str, timeout_s: float | None) -> None:
        """Return when `tier` has verified every save of this launch that its retention keeps.

        If it raises, it also reports the saves that are on no tier, if nobody may flush them any more.

        Raises:
            TimeoutError: saves are missing after `timeout_s`, or the daemon does not answer; the message names them.
            StoreRefused: the tier refuses; the message names the missing saves.
            ConfigError: the daemon has no tier of that name.
            DaemonUnavailable: no daemon answers.
        """
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            backlog = self._ask(end_s, hurry=True)
        except TimeoutError as error:
            unsent = self._in_spool()
            raise TimeoutError(f"{tier}: {_steps(unsent)} not known to be verified there: {error}") from None
        if tier not in backlog.tiers:
            self._warn(backlog, waited=False)
            raise ConfigError(f"wait={tier!r}: the daemon has no tier of that name; it has {', '.join(backlog.tiers)}")

        def is_sent(now: UnflushedParts) -> bool:
            unsent = [remainder for remainder in self._unsent(now) if tier in remainder.lacks]
            state = now.tiers.get(tier)
            if unsent and (state is None or state.refused):
                self._warn(now, waited=True)
                raise StoreRefused(f"{tier}: {_steps(unsent)} not there: {state.error if state else 'no such tier'}")
            return not unsent

        last = self._poll(is_sent, end_s, backlog)
        if not is_sent(last):
            self._warn(last, waited=True)
            unsent = [remainder for remainder in self._unsent(last) if tier in remainder.lacks]
            why = f"; its last error: {last.tiers[tier].error}" if last.tiers[tier].error else ""
            why += f"; {pause_text(last.paused)}" if last.paused else ""
            raise TimeoutError(f"{tier}: {_steps(unsent)} not verified there after {timeout_s:g} s{why}")

    def report(self, *, patient: bool, timeout_s: float | None) -> None:
        """Report the saves that are on no tier if nobody may flush them any more; raises nothing.

        If `patient`, first wait for the tiers if the daemon ends with this process or the node, at most `timeout_s`, or
        `LAST_FLUSH_S` without one.
        """
        begun_s = time.monotonic()
        end_s = begun_s + (LAST_FLUSH_S if timeout_s is None else timeout_s)
        try:
            try:
                backlog = self._ask(min(end_s, begun_s + _SOON_S))
            except TimeoutError:
                if not (patient and self._ends_with_us):
                    raise
                backlog = self._ask(end_s)  # no daemon flushes later, so a slow one gets more time
            if self._ends_with_us or backlog.problem:  # else the daemon continues to flush
                backlog = self._ask(end_s, hurry=True)
                waits = patient and self._ends_with_us
                if waits:
                    backlog = self._poll(lambda now: not self._worth_waiting(now), end_s, backlog)
                self._report(backlog, waited=waits)
        except (TierdError, TimeoutError, OSError) as error:
            self._report_unknown(error)

    def _worth_waiting(self, backlog: UnflushedParts) -> bool:
        """Whether a tier may still take a save: one that accepts, or for saves on no tier, one that only does not
        answer.
        """
        if backlog.paused:
            return False
        return any(
            (state := backlog.tiers[name]).accepts or (not remainder.on and not state.refused)
            for remainder in self._unsent(backlog)
            for name in remainder.lacks
        )

    def _poll(
        self, is_over: Callable[[UnflushedParts], bool], end_s: float | None, backlog: UnflushedParts
    ) -> UnflushedParts:
        """Return the first backlog for which `is_over` is true, or the last one before `end_s`."""
        start_s = logged = time.monotonic()
        first = backlog.left_bytes
        with TerminalLine() as line:
            while not is_over(backlog) and (end_s is None or time.monotonic() < end_s):
                now, left_bytes = time.monotonic(), backlog.left_bytes
                activity = f"closing: {_steps(self._unsent(backlog))} not on every tier yet"
                sizes = (
                    f"{left_bytes / 1e9:.1f} GB of the node to "
                    f"send{transfer_rate_text(first - left_bytes, now - start_s, left_bytes)}"
                )
                drawn = now - start_s < self._timings.close_shown_s or line.draw(f"tierd: {sizes}: {activity}")
                if not drawn and now - logged >= self._timings.close_logged_s:
                    logged = now
                    log.info("%s; %s", activity, sizes)
                left_s = math.inf if end_s is None else end_s - time.monotonic()
                time.sleep(max(0.0, min(self._timings.close_poll_s, left_s)))
                try:
                    backlog = self._ask(end_s)
                except TimeoutError:
                    if end_s is None:
                        raise
        return backlog

    def _ask(self, end_s: float | None, *, hurry: bool = False) -> UnflushedParts:
        """Ask for the backlog; with `hurry`, after a fresh listing of the tiers if they answer."""
        share = 0.6 if hurry else 1.0  # the rest is for the second question
        request = AskBacklog(hurry=hurry, newest=hurry and self._node_ends)
        try:
            return self._answer(request, _limit(end_s, share))
        except DaemonUnavailable:
            self._renew()  # the daemon that this connection reached may have ended or died
            return self._answer(request, _limit(end_s))
        except TimeoutError:
            if not hurry:
                raise
            return self._answer(AskBacklog(), _limit(end_s))  # a tier hangs: ask without it

    def _answer(self, request: AskBacklog, limit_s: float) -> UnflushedParts:
        with DaemonConnection(self._spool) as link:
            self._ends_with_us = self._node_ends or link.check_peer(ends_with_us)
            return parse_backlog(link.ask(request, limit_s))

    def _unsent(self, backlog: UnflushedParts) -> list[UnflushedPart]:
        return [remainder for remainder in backlog.left if self._has_saved(remainder.part)]

    def _warn(self, backlog: UnflushedParts, *, waited: bool) -> None:
        if self._ends_with_us or backlog.problem:
            self._report(backlog, waited=waited)

    def _report(self, backlog: UnflushedParts, *, waited: bool) -> None:
        nowhere = [remainder for remainder in self._unsent(backlog) if not remainder.on]
        if not nowhere:
            return
        why = "they were not flushed in time" if waited else "this close waited for no tier"
        if backlog.problem:
            why = f"no tier accepts checkpoints ({backlog.problem})"
        ending = "node ends" if self._node_ends else "daemon ends with this container"
        last = f"; the {ending}, and nobody flushes them" if self._ends_with_us else ""
        log.warning("closed: %s on no tier, only in the spool: %s%s", _steps(nowhere), why, last)

    def _in_spool(self) -> list[UnflushedPart]:
        """Return this launch's saves in the spool, newest first."""
        try:
            parts = [part for part in self._spool.parts() if self._has_saved(part)]
        except (OSError, TierdError):
            parts = []
        return [UnflushedPart(part=part, size_bytes=0, on=(), lacks=()) for part in reversed(parts)]

    def _report_unknown(self, error: Exception) -> None:
        if remainders := self._in_spool():
            log.warning(
                "closed: %s in the spool, and on no tier that is known of: %s",
                _steps(remainders),
                self._silent() or error,
            )


def check_wait(wait: object, timeout: object, *, tiers: bool) -> None:
    if wait is not None and (not isinstance(wait, str) or not wait):
        raise ConfigError(f'wait={wait!r}: None, "local", or a tier\'s name')
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0):
        raise ConfigError(f"timeout={timeout!r}: seconds, or None")
    if wait not in (None, SPOOL) and not tiers:
        raise ConfigError(f"wait={wait!r}: this Checkpointer has no tier (to=[])")


def check_no_save_failed(tier: str, failed: Mapping[int, str]) -> None:
    """Raise `SaveFailed` if a save failed, so that no tier gets it. `failed` has the reason by step."""
    if failed:
        steps = _steps_are(sorted(failed, reverse=True))
        raise SaveFailed(f"{tier}: {steps} not there, because saving failed: {failed[max(failed)]}")


def describe_lost_saves(spool: Spool, nowhere: Mapping[PartId, str]) -> str:
    """Describe the saves whose states are in no place (`SaveRecords.lost_parts`); empty without any."""
    with suppress(OSError, TierdError):  # a trainer may take a save for failed that its daemon committed
        present = set(spool.parts())
        nowhere = {part: why for part, why in nowhere.items() if part not in present}
    if not nowhere:
        return ""
    last = max(nowhere, key=lambda part: part.checkpoint.step)
    steps = _steps_are(sorted((part.checkpoint.step for part in nowhere), reverse=True))
    disk = ""
    with suppress(OSError):
        free, total = spool.free()
        disk = f" ({free} of {total} bytes are free there now)"
    return (
        f"spool {spool.root}{disk}: {steps} in no place, because saving failed: {nowhere[last]}; end the cause, then "
        "start the job again: it resumes from the newest checkpoint before. If this process still has the state, a new "
        "Checkpointer can save it"
    )


def _limit(end_s: float | None, share: float = 1.0) -> float:
    return _ANSWER_S if end_s is None else min(_ANSWER_S, max(_LEAST_S, share * (end_s - time.monotonic())))


def _steps(remainders: Sequence[UnflushedPart]) -> str:
    return _steps_are([remainder.part.checkpoint.step for remainder in remainders])


def _steps_are(newest_first: Sequence[int]) -> str:
    """Format as `2 saves (steps 7, 9) are`, newest last."""
    steps = [str(step) for step in newest_first]
    listing = ", ".join(reversed(steps[:_LISTED_STEPS]))
    older = f"{len(steps) - _LISTED_STEPS} older and " if len(steps) > _LISTED_STEPS else ""
    return f"1 save (step {listing}) is" if len(steps) == 1 else f"{len(steps)} saves ({older}steps {listing}) are"
