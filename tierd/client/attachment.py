"""The trainer's tie to the node's daemon.

Law: the daemon is a convenience of saving and a necessity only of restoring what the spool lacks. Losing it is logged.
One that is silent is waited for once: after that, a question that lies unanswered in its socket tells when it wakes.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

from tierd.client.acceptance import Watch
from tierd.core.config import from_urls
from tierd.core.errors import ConfigError, DaemonSilent, DaemonUnavailable, TierdError, VersionMismatch
from tierd.core.ids import PartId
from tierd.core.remaining import Backlog, backlog_of
from tierd.core.sight import told
from tierd.core.urls import parse_url
from tierd.core.wire import Attach, Candidates, MakeRoom, Request
from tierd.core.wire import Backlog as AskBacklog
from tierd.link import Link, start_daemon
from tierd.spool import Spool

log = logging.getLogger("tierd")

_TOLD = 5.0  # seconds that what it is told may take
_ANSWER = 5.0  # seconds that naming an attempt waits for the daemon's look at the tiers
_ROOM = 10.0  # seconds that a save which met a full disk waits for the daemon to make room
_SILENCE = 1.0  # seconds of them without a sign of work after which the daemon counts as stopped
_ALONE = 30.0  # seconds for which no save asks a daemon that was found stopped


class Attachment:
    """Known to the daemon as a trainer for as long as this is open, where one is to be.

    Attributes:
        keep_last: how many checkpoints the daemon keeps in the spool; None while no daemon has said so.

    Args:
        to: URLs of the tiers that a daemon is started for; None where one is expected to be there; empty for none.
        run: which this trainer saves. The tiers are asked for it, and other runs in the spool may count as finished.

    Raises:
        ConfigError: a URL cannot be used.
        DaemonUnavailable: the daemon for `to` did not start. One that is there and silent is done without.
    """

    def __init__(self, spool: Spool, to: Sequence[str] | None, run: str) -> None:
        self._spool, self._run = spool, run
        self.keep_last: int | None = None
        if isinstance(to, str) or not all(isinstance(url, str) for url in to or ()):
            raise ConfigError(f"to={to!r}: a list of URLs, such as to=['s3://bucket/prefix']")
        self._to = tuple(to) if to is not None else None
        self._link: Link | None = None
        self._silence = ""  # why the daemon cannot be asked, since it fell silent
        self._lock = threading.Lock()
        self._keeping: threading.Thread | None = None
        self._warned = ""  # of which silence or mismatch of versions the log was told
        self._telling: threading.Thread | None = None  # the last one that does
        self._watch: Watch | None = None
        self._not_before = 0.0  # monotonic seconds; no save asks the daemon earlier
        if self._to:
            try:
                self._attach(self._to)
            except DaemonSilent as error:
                self._warn(error)
            self._watch = Watch(functools.partial(self._backlog, run))
        else:
            self.renew()

    @property
    def to(self) -> str:
        """What was given, for messages and to be compared; URLs hold no secret."""
        return repr(self._to if self._to is None else [str(parse_url(url)) for url in self._to])

    @property
    def tiers(self) -> bool:
        """Whether there may be copies beyond the spool."""
        return self._to != ()

    @property
    def silent(self) -> str:
        """Why the daemon cannot be asked, where it is there and was not heard since it fell silent; else empty."""
        return self._silence if self._is_silent() else ""

    def _is_silent(self) -> bool:
        link = self._link
        if not self._silence:
            return False
        return not link.heard() if link else time.monotonic() < self._not_before

    def attempts(self, run: str) -> set[str]:
        """Every attempt that the spool or, where it answers within seconds, the daemon shows."""
        try:
            seen = self._spool.attempts(run)
        except OSError as error:  # the clock's word then; naming an attempt must not end a training
            log.warning("spool %s: %s", self._spool.root, error)
            seen = set()
        if self.tiers:
            try:
                seen |= told(self._ask_for_save(Candidates(run=run), _ANSWER)).attempts
            except (TierdError, TimeoutError):
                pass  # the spool's word, and the clock's
        return seen

    def keep(self) -> None:
        """After a save: the daemon may have ended, and this checkpoint needs one, or another may have come.

        Returns at once: a daemon that takes its time to start, or to answer, must not hold up the next save.
        """
        if self._watch:
            self._watch.saved()
        if self._to == () or (self._keeping and self._keeping.is_alive()):
            return
        self._keeping = threading.Thread(target=self.renew, name="tierd-keep")
        try:
            self._keeping.start()
        except RuntimeError:  # the interpreter is ending, and starts no thread any more
            self.renew()

    def renew(self) -> None:
        """Attach again, to a new daemon if need be and `to` says which, unless the old tie still holds."""
        if self._to == ():
            return
        try:
            with self._lock:
                if not self._is_silent() and (self._silence or self._link is None or not self._link.alive()):
                    self._attach(self._to)
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
        """Have the daemon give up verified copies, so that `size_bytes` fit; whether a second try is worth it.

        It takes at most `_ROOM` seconds, and so is nothing for the thread that trains.
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
        """Ask while a save waits: a daemon that is stopped costs `_SILENCE` seconds, and is then left alone."""
        begun = time.monotonic()
        if begun < self._not_before:
            raise DaemonUnavailable("the daemon was silent a moment ago")
        try:
            with Link(self._spool, silence_s=_SILENCE) as link:
                return link.ask(request, timeout_s)
        except DaemonUnavailable:
            if time.monotonic() - begun >= _SILENCE:  # it is there, or nobody would have been waited for
                self._not_before = time.monotonic() + _ALONE
            raise

    def tell(self, request: Request) -> None:
        """Have the daemon know of something, after what it was told before; returns at once, and where none answers
        soon, nobody is told."""
        if self.tiers:
            told = request, self._telling
            self._telling = threading.Thread(target=self._tell, args=told, name="tierd-tell", daemon=True)
            try:
                self._telling.start()
            except RuntimeError:  # the interpreter is ending, or no thread is to be had
                pass

    def _tell(self, request: Request, before: threading.Thread | None) -> None:
        if before and before.ident:
            before.join(_TOLD)
        try:
            with Link(self._spool) as link:
                link.ask(request, _TOLD)
        except (TierdError, TimeoutError, OSError) as error:
            log.info("the daemon was not told: %s", error)

    def _backlog(self, run: str, hurry: bool) -> Backlog:
        with Link(self._spool) as link:
            return backlog_of(link.ask(AskBacklog(hurry=hurry, run=run), _ANSWER))

    def close(self, patience_s: float = _TOLD) -> None:
        """Let go. The daemon flushes what is left and ends by itself. `renew` attaches again.

        Args:
            patience_s: seconds that what it is being told, and asked, may still take.
        """
        end_s = time.monotonic() + patience_s
        if self._watch:
            self._watch.close(patience_s)
        if self._keeping and self._keeping.ident:
            self._keeping.join()
        if self._telling and self._telling.ident:
            self._telling.join(max(0.0, end_s - time.monotonic()))
        self._let_go()

    def _attach(self, to: Sequence[str] | None) -> None:
        config = from_urls(str(self._spool.root), to) if to is not None else None
        self._let_go()
        try:
            self._link = self._reach(to)
            self._link.greet()
            answer = self._link.ask(Attach(run=self._run), None if to is not None else _ANSWER)
        except VersionMismatch as error:  # that daemon flushes what it finds in the spool, attached to or not
            self._let_go()
            if str(error) != self._warned:
                self._warned = str(error)
                log.warning("%s", error)
            return
        except (DaemonSilent, TimeoutError) as error:
            self._silence, self._not_before = str(error), time.monotonic() + _ALONE
            raise
        self._not_before, self._warned = 0.0, ""
        tiers, self.keep_last = answer["tiers"], answer.get("keep_last")
        if config is not None and sorted(tiers.values()) != sorted(tier.url for tier in config.tier):
            log.warning("spool %s: its daemon has other tiers than `to` names: %s", self._spool.root, tiers)

    def _reach(self, to: Sequence[str] | None) -> Link:
        try:
            return Link(self._spool)
        except DaemonSilent:
            raise
        except DaemonUnavailable:
            if to is None:
                raise
            start_daemon(self._spool, to)
            return Link(self._spool)

    def _let_go(self) -> None:
        link, self._link, self._silence = self._link, None, ""
        if link is not None:
            link.close()
