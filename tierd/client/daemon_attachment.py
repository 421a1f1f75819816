"""The trainer's connection to the node's daemon.

Invariant: saving works without the daemon; only restoring what the spool lacks needs it. Losing the daemon is logged. A
silent daemon is waited for once. After that, an unanswered request stays in its socket, and the answer shows when the
daemon wakes.
"""

from __future__ import annotations

import functools
import logging
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tierd.client.client_timings import USUAL_TIMINGS, ClientTimings
from tierd.client.ranks.boards import TierBoard
from tierd.client.user_messages import AcceptanceWatch
from tierd.core.config import from_urls
from tierd.core.errors import ConfigError, DaemonSilent, DaemonUnavailable, TierdError, VersionMismatch
from tierd.core.ids import PartId
from tierd.core.planning.unflushed_parts import UnflushedParts, parse_backlog
from tierd.core.timeline.run_view import RunView
from tierd.core.urls import parse_url
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.ipc.daemon_start import describe_daemon_end, start_daemon
from tierd.ipc.message_codec import read_member
from tierd.ipc.messages import Attach, CandidatesRequest, MakeRoom, Request
from tierd.ipc.messages import BacklogRequest as AskBacklog
from tierd.spool.run_records import unset_local_only
from tierd.spool.spool import Spool
from tierd.spool.spool_access import spool_errors

log = logging.getLogger("tierd")

_REPORT_S = 5.0  # seconds that delivering one event may take
_ROOM = 10.0  # seconds that a save which met a full disk waits for the daemon to make room
_POLL_S = 0.02  # seconds between two looks whether a silent daemon answers


class Attachment:
    """A trainer's registration with the daemon, for as long as this object is open. Without tiers there is none.

    Args:
        to: URLs of the tiers for which a daemon is started; None expects that one is there; empty for no tiers.
        run: the daemon observes its tiers for this run, and may treat other runs in the spool as finished.

    Attributes:
        keep_last: how many checkpoints the daemon keeps in the spool; None until a daemon has said so.

    Raises:
        ConfigError: a URL cannot be used.
        DaemonUnavailable: the daemon for `to` did not start. A daemon that is there but silent does not raise.
    """

    def __init__(
        self, spool: Spool, to: Sequence[str] | None, run: str, timings: ClientTimings = USUAL_TIMINGS
    ) -> None:
        self._spool, self._run, self._timings = spool, run, timings
        self.keep_last: int | None = None
        if isinstance(to, str) or not all(isinstance(url, str) for url in to or ()):
            raise ConfigError(f"to={to!r}: a list of URLs, such as to=['s3://bucket/prefix']")
        self._to = tuple(to) if to is not None else None
        self._link: DaemonConnection | None = None
        self._silence = ""  # why the daemon cannot be asked, since it fell silent
        self._lock = threading.RLock()  # reentrant, because a signal handler that closes may interrupt its holder
        self._renewing = False  # whether the holder of the lock registers
        self._keeping: threading.Thread | None = None
        self._warned = ""  # the silence or version mismatch that was last logged
        self._reporting: threading.Thread | None = None  # the last thread that delivers an event
        self._watch: AcceptanceWatch | None = None
        self._not_before = 0.0  # monotonic seconds; no save asks the daemon before this time
        self._tiers: dict[str, str] | None = None  # name -> URL, as the daemon reported
        if self._to != ():
            if self._to:
                from_urls(str(spool.root), self._to)  # first, because a URL may be wrong
            with spool_errors(f"spool {spool.root}", spool.root):
                unset_local_only(spool.control, run)  # before the daemon counts what earlier launches have saved
        if self._to:
            try:
                self._attach(self._to)
            except DaemonSilent as error:
                self._warn(error)
            self._watch = AcceptanceWatch(functools.partial(self._backlog, run), timings.acceptance_s)
        else:
            self.renew()

    @property
    def to_text(self) -> str:
        """The given URLs, for messages and comparisons between ranks; URLs hold no secret."""
        return repr(self._to if self._to is None else [str(parse_url(url)) for url in self._to])

    @property
    def has_tiers(self) -> bool:
        return self._to != ()

    @property
    def silence_reason(self) -> str:
        """Why a running daemon cannot be asked, since it fell silent and sent nothing; else empty."""
        return self._silence if self._is_silent() else ""

    def _is_silent(self) -> bool:
        link = self._link
        if not self._silence:
            return False
        return not link.has_unread() if link else time.monotonic() < self._not_before

    def attempts(self, run: str) -> set[str]:
        """Return every attempt in the spool and, if the daemon answers within seconds, on the tiers."""
        try:
            attempts = self._spool.attempts(run)
        except OSError as error:  # the clock decides then, because naming an attempt must not end a training
            log.warning("spool %s: %s", self._spool.root, error)
            attempts = set()
        if self.has_tiers:
            try:
                answer = self._ask_for_save(CandidatesRequest(run=run), self._timings.names_s)
                attempts |= read_member(answer, "sight", RunView).attempts
            except (TierdError, TimeoutError):
                pass  # the spool and the clock decide then
        return attempts

    def renew_soon(self) -> None:
        """Renew the registration after a save, because the daemon may have ended; a slow one delays no save."""
        if self._watch:
            self._watch.ask_soon()
        self._renew_behind()

    def _renew_behind(self) -> None:
        if self._to == () or (self._keeping and self._keeping.is_alive()):
            return
        self._keeping = threading.Thread(target=self.renew, name="tierd-keep")
        try:
            self._keeping.start()
        except RuntimeError:  # the interpreter is ending, and starts no more threads
            self.renew()

    def renew(self, patience_s: float = 0.0) -> None:
        """Register again unless the connection still holds. Starts a daemon if `to` names tiers and there is none.

        A silent daemon gets `patience_s` to answer, because it may just have woken.
        """
        if self._to == ():
            return
        end_s = time.monotonic() + patience_s
        while self._is_silent() and time.monotonic() < end_s:
            time.sleep(_POLL_S)
        try:
            with self._lock:
                if self._renewing:  # by the thread that a signal handler has interrupted, so no wait would end
                    return
                self._renewing = True
                try:
                    if not self._is_silent() and (self._silence or self._link is None or not self._link.is_alive()):
                        self._attach(self._to)
                finally:
                    self._renewing = False
        except DaemonSilent as error:
            self._warn(error)
        except (TierdError, TimeoutError, OSError) as error:
            if self._to is not None:
                log.warning("no daemon takes checkpoints from the spool: %s", error)

    def _warn(self, error: Exception) -> None:
        if str(error) != self._warned:
            self._warned = str(error)
            log.warning("no daemon takes checkpoints from the spool: %s", error)

    def make_room(self, part: PartId, size_bytes: int, quota: bool) -> bool:
        """Ask the daemon to delete verified copies; return whether a second try is worth it.

        Takes at most `_ROOM` seconds, so the training thread must not call it.
        """
        if self._to == ():
            return False
        request = MakeRoom(run=part.checkpoint.run, size_bytes=size_bytes, quota=quota)
        try:
            return bool(self._ask_for_save(request, _ROOM).get("enough"))
        except (TierdError, TimeoutError, OSError) as error:
            log.info("the daemon made no room: %s", error)
            return False

    def _ask_for_save(self, request: Request, timeout_s: float) -> dict[str, Any]:
        """Ask while a save waits. A stopped daemon costs `room_silence_s`, and is then not asked for a while."""
        start_s = time.monotonic()
        if start_s < self._not_before:
            raise DaemonUnavailable("the daemon was silent a moment ago")
        try:
            with DaemonConnection(self._spool, silence_s=self._timings.room_silence_s) as link:
                return link.ask(request, timeout_s)
        except DaemonUnavailable:
            # Then the daemon is stopped: an absent one would have failed at once.
            if time.monotonic() - start_s >= self._timings.room_silence_s:
                self._not_before = time.monotonic() + self._timings.alone_s
            raise

    def report(self, request: Request) -> None:
        """Send an event to the daemon in order, without blocking; dropped if none answers within `_REPORT_S`."""
        if self.has_tiers:
            arguments = request, self._reporting
            self._reporting = threading.Thread(target=self._report, args=arguments, name="tierd-report", daemon=True)
            try:
                self._reporting.start()
            except RuntimeError:  # the interpreter is ending, or no thread could be started
                pass

    def _report(self, request: Request, before: threading.Thread | None) -> None:
        if before and before.ident:
            before.join(_REPORT_S)
        try:
            with DaemonConnection(self._spool) as link:
                link.ask(request, _REPORT_S)
        except (TierdError, TimeoutError, OSError) as error:
            log.info("the daemon was not told: %s", error)

    def _backlog(self, run: str, hurry: bool) -> UnflushedParts:
        if self._silence and not self._is_silent():
            # The daemon that woke may not know this launch's tiers, and no save may follow.
            self._renew_behind()
        with DaemonConnection(self._spool) as link:
            return parse_backlog(link.ask(AskBacklog(hurry=hurry, run=run), self._timings.names_s))

    def close(self, patience_s: float = _REPORT_S) -> None:
        """Close the connection; `renew` registers again. Pending events and questions get `patience_s`."""
        end_s = time.monotonic() + patience_s
        if self._watch:
            self._watch.close(patience_s)
        if self._keeping and self._keeping.ident:
            self._keeping.join()
        if self._reporting and self._reporting.ident:
            self._reporting.join(max(0.0, end_s - time.monotonic()))
        self._let_go()

    def _attach(self, to: Sequence[str] | None) -> None:
        config = from_urls(str(self._spool.root), to) if to is not None else None
        self._let_go()
        urls = tuple(tier.url for tier in config.tier) if config is not None else ()
        try:
            answer = self._register(to, urls)
        except VersionMismatch as error:
            # That daemon flushes what it finds in the spool, with or without a registration.
            self._let_go()
            if str(error) != self._warned:
                self._warned = str(error)
                log.warning("%s", error)
            return
        except (DaemonSilent, TimeoutError) as error:
            self._silence, self._not_before = str(error), time.monotonic() + self._timings.alone_s
            raise
        self._not_before, self._warned = 0.0, ""
        self._tiers = tiers = answer["tiers"]
        self.keep_last = answer.get("keep_last")
        self._check_tiers(urls, tiers, answer)

    def _register(self, to: Sequence[str] | None, urls: Sequence[str]) -> dict[str, Any]:
        """Register, and once more if the daemon ends meanwhile, as an idle one does, because `_reach` starts another.

        Returns the daemon's answer to `Attach`. Raises as `_reach` and `DaemonConnection.ask`.
        """
        limit_s = None if to is not None else self._timings.names_s
        for may_retry in (to is not None, False):
            link = self._link = self._reach(to)  # a signal handler may close and forget it at any line
            try:
                link.greet()
                return link.ask(Attach(run=self._run, to=tuple(urls)), limit_s)
            except DaemonUnavailable as error:
                if not may_retry or isinstance(error, DaemonSilent | VersionMismatch):
                    raise
                log.info("the daemon ended while it was asked: %s", error)
                self._let_go()
        raise AssertionError  # the second try returns or raises

    def _check_tiers(self, urls: Sequence[str], tiers: Mapping[str, str], answer: Mapping[str, Any]) -> None:
        """Log which tiers of `to` the daemon does not have, and the way out."""
        has = {str(parse_url(url)) for url in tiers.values()}
        absent = [str(parse_url(url)) for url in urls if str(parse_url(url)) not in has]
        if not absent:
            return
        # A daemon that does not say why is older than `to` in `Attach`.
        why = answer.get("refused") or (
            f"it is of an older version; end it (`kill {answer.get('pid')}`, if a trainer started it), and the next "
            "save starts one with these tiers"
        )
        log.warning(
            "spool %s: its daemon has other tiers than `to` names, so nothing is sent to %s: it has %s; %s",
            self._spool.root,
            ", ".join(absent),
            ", ".join(f"{name} ({parse_url(url)})" for name, url in tiers.items()),
            why,
        )

    def board(self, launch: str, world: int) -> TierBoard | None:
        """Make a board on a tier for ranks on several nodes that cannot talk otherwise; None without a tier.

        Raises `DaemonUnavailable` if no daemon of this version answers, because the other nodes' ranks would wait in
        vain.
        """
        if self._to == ():
            return None
        why = self._silence
        if self._tiers is None and not why:
            try:
                self._attach(self._to)
                why = self._warned
            except (DaemonUnavailable, TimeoutError, OSError) as error:
                why = str(error)
        if self._tiers is None:
            raise DaemonUnavailable(
                f"{world} ranks on several nodes have no way to talk but their daemons and a tier, and on node "
                f"{socket.gethostname()} {why}; or initialise torch.distributed before the Checkpointer is made, or "
                "give every rank the same attempt= (tierd.new_attempt() makes one)"
            )
        for name, url in self._tiers.items():
            tier = f"tier {name} ({parse_url(url)})"
            return TierBoard(self._spool, self._run, launch, world, tier, self.renew, self._timings.notes_s)
        return None

    def _reach(self, to: Sequence[str] | None) -> DaemonConnection:
        try:
            return DaemonConnection(self._spool, greeting_s=self._timings.hello_s)
        except DaemonSilent:
            raise
        except DaemonUnavailable:
            if to is None:
                raise
            if end := describe_daemon_end(self._spool):  # the next one may end like it, and the saves be on no tier
                log.warning("spool %s: another daemon is started, because the last one %s", self._spool.root, end)
            start_daemon(self._spool, to)
            return DaemonConnection(self._spool)

    def _let_go(self) -> None:
        link, self._link, self._silence = self._link, None, ""
        if link is not None:
            link.close()
